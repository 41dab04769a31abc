"""Reads the keyword-only parameters of a class or function from its source, so that nothing heavy is imported.

Where the source uses more than this module understands, the module is imported instead.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import Field

from eagleray.config.schedule import Schedule

Fields = dict[str, tuple[Any, Any]]  # annotation and default of each parameter; `...` is the default of a required one

# Packages whose names mean what they mean when imported: none of these loads PyTorch.
LIGHT = ("annotated_types", "collections", "dataclasses", "eagleray.config", "numbers", "pydantic", "typing")
CALLS = (Field, Schedule)  # what a default or an annotation may call
BUILTINS = {kind.__name__: kind for kind in (bool, dict, float, frozenset, int, list, str, tuple)}


class Unreadable(Exception):
    """The source holds something that only an import can evaluate."""


def fields(module: str, function: str | None = None, *, skip: Container[str] = ()) -> Fields:
    """Return the keyword-only parameters of a module's one public class, or of a function, except for those in `skip`.

    The parameters are read from the source. Where the source is not enough, the module is imported.
    """
    try:
        return from_source(module, function, skip=skip)
    except Unreadable:
        target = getattr(importlib.import_module(module), function) if function else public_class(module)
        return from_import(target, skip=skip)


def public_class(module: str) -> type:
    """Import the module and return its one public class."""
    classes = [c for c in vars(importlib.import_module(module)).values() if inspect.isclass(c)]
    [target] = [c for c in classes if c.__module__ == module and not c.__name__.startswith("_")]
    return target


def from_import(target: Callable[..., Any], *, skip: Container[str] = ()) -> Fields:
    """Return the keyword-only parameters of an imported class or function."""
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)  # type: ignore[misc]
    parameters = [p for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {
        p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in parameters if p.name not in skip
    }


def from_source(module: str, function: str | None = None, *, skip: Container[str] = ()) -> Fields:
    """Return the keyword-only parameters of a module's one public class, or of a function, without importing it.

    Raises Unreadable."""
    source = _source(module)
    if function is None:
        classes = [n for n in source.tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
        scope, function = (classes[0].body if len(classes) == 1 else []), "__init__"
    else:
        scope = source.tree.body
    matches = [n for n in scope if isinstance(n, ast.FunctionDef) and n.name == function]
    if len(matches) != 1:
        raise Unreadable(f"{module}: expected one {function}, and for a class one public class that defines it")
    arguments = matches[0].args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        a.arg: (source.annotation(a.annotation), ... if default is None else source.value(default))
        for a, default in pairs
        if a.arg not in skip
    }


def forget() -> None:
    """Clear the cache, so that the source of every module is read again."""
    _source.cache_clear()


def constant(module: str, name: str, *, class_name: str | None = None) -> Any:
    """Return a class attribute of a module's one public class, or of its class `class_name`, without importing it.

    The attribute may be inherited from a class of the same package. Raises Unreadable.
    """
    source = _source(module)
    classes = [n for n in source.tree.body if isinstance(n, ast.ClassDef)]
    classes = [n for n in classes if (n.name == class_name if class_name else not n.name.startswith("_"))]
    if len(classes) != 1:
        raise Unreadable(f"{module}: expected one class {class_name or 'that is public'}")
    for node in classes[0].body:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return source.value(value)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                return source.value(value)
    for base in classes[0].bases:
        if isinstance(base, ast.Name):
            origin, attribute = source.imported.get(base.id, (module, base.id))
            if origin.partition(".")[0] == module.partition(".")[0]:
                return constant(origin, name, class_name=attribute)
    raise Unreadable(f"{module}: {name}")


def headline(module: str) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(_source(module).tree) or "").split())
    # A full stop that ends a sentence: not that of `et al.` or of an initial.
    return re.split(r"(?<!\bal\.)(?<!\b[A-Z]\.)(?<=\.)\s(?=[A-Z])", text, maxsplit=1)[0]


class _Source:
    """A module as its syntax tree; names are looked up in it and in the modules that it imports from."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.module, self.tree = module, tree
        self.assigned: dict[str, ast.expr] = {}
        self.imported: dict[str, tuple[str, str | None]] = {}  # module, and the name imported from it
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.assigned[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.assigned[name] = value
                case ast.Import(names=names):
                    self.imported |= {a.asname or a.name.partition(".")[0]: (_bound(a), None) for a in names}
                case ast.ImportFrom(module=str(origin), names=names, level=0):
                    self.imported |= {a.asname or a.name: (origin, a.name) for a in names}

    def annotation(self, node: ast.expr | None) -> Any:
        """Return the value of an annotation. Raises Unreadable when it is missing or written as a string."""
        if node is None or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            raise Unreadable(f"{self.module}: expected an annotation that is no string")
        return self.value(node)

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression of names, literals, `a[b]`, `a | b` and the calls in CALLS. Raises Unreadable."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.name(name)
            case ast.Attribute(value=owner, attr=name):
                found = self.value(owner)
                if inspect.ismodule(found) and hasattr(found, name):
                    return getattr(found, name)
            case ast.Subscript(value=owner, slice=index):
                return self.value(owner)[self.value(index)]
            case ast.Tuple(elts=items):
                return tuple(self.value(item) for item in items)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.value(left) | self.value(right)
            case ast.Call(func=func, args=args, keywords=keywords):
                call = self.value(func)
                if any(call is c for c in CALLS) and all(k.arg for k in keywords):
                    return call(*map(self.value, args), **{str(k.arg): self.value(k.value) for k in keywords})
        raise Unreadable(f"{self.module}:{node.lineno}: {ast.unparse(node)}")

    @property
    def light(self) -> bool:
        """Return whether this module imports nothing but light ones, so that it may be imported itself."""
        return all(_light(module) for module, _ in self.imported.values())

    def name(self, name: str) -> Any:
        """Return the value that a name has in this module. Raises Unreadable."""
        if name in self.assigned:
            return self.value(self.assigned[name])
        if name in self.imported:
            module, attribute = self.imported[name]
            if _light(module) or (attribute is not None and _ours(module, self.module) and _source(module).light):
                found = importlib.import_module(module)
                return found if attribute is None else getattr(found, attribute)
            if attribute is not None and _ours(module, self.module):
                return _source(module).name(attribute)
        elif name in BUILTINS:
            return BUILTINS[name]
        raise Unreadable(f"{self.module}: {name}")


def _light(module: str) -> bool:
    return any(module == light or module.startswith(light + ".") for light in LIGHT)


def _ours(module: str, beside: str) -> bool:
    """Return whether two modules are of one package."""
    return module.partition(".")[0] == beside.partition(".")[0]


def _bound(alias: ast.alias) -> str:
    """Return the module that `import a.b` or `import a.b as c` binds to a name."""
    return alias.name if alias.asname else alias.name.partition(".")[0]


@functools.cache
def _source(module: str) -> _Source:
    """Parse the source of a module. Raises Unreadable for a module without Python source."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise Unreadable(f"{module}: has no Python source")
    return _Source(module, ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
