"""Reads the keyword-only parameters of a class from its source, so that heavy packages are not imported.

Python evaluates the annotations and defaults with only those names of the module that they use. If one of these names
comes from a heavy package, the module is imported instead."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

Fields = dict[str, tuple[Any, Any]]  # (annotation, default) by parameter; `...` is the default of a required one

# Packages that may be imported to evaluate a name that comes from them, as none of them loads PyTorch.
LIGHT = ("annotated_types", "collections", "dataclasses", "eagleray.config", "numbers", "pydantic", "typing")


class Unreadable(Exception):
    """The source holds something that only an import can evaluate."""


def fields(module: str) -> Fields:
    """Return the keyword-only parameters of a module's one public class.

    They are read from the source. If that is not possible, the module is imported."""
    try:
        return from_source(module)
    except Unreadable:
        return from_import(public_class(module))


def public_class(module: str) -> type:
    """Import the module and return its one public class."""
    classes = [c for c in vars(importlib.import_module(module)).values() if inspect.isclass(c)]
    [target] = [c for c in classes if c.__module__ == module and not c.__name__.startswith("_")]
    return target


def from_import(target: type) -> Fields:
    """Return the keyword-only parameters of an imported class."""
    hints = get_type_hints(target.__init__, include_extras=True)  # type: ignore[misc]
    parameters = [p for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in parameters}


def from_source(module: str) -> Fields:
    """Return the keyword-only parameters of a module's one public class, without importing it.

    Raises Unreadable when the class has no single `__init__`, or an expression needs an import."""
    source = _source(module)
    matches = [n for n in source.class_of().body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if len(matches) != 1:
        raise Unreadable(f"{module}: expected one __init__")
    arguments = matches[0].args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        a.arg: (source.annotation(a.annotation), ... if default is None else source.value(default))
        for a, default in pairs
    }


def forget() -> None:
    """Clear the cache, so that the source of every module is read again."""
    _source.cache_clear()


def constant(module: str, name: str, *, class_name: str | None = None) -> Any:
    """Return a class attribute of a module's one public class, or of its class `class_name`, without importing it.

    The attribute may be inherited from a class of the same package. Raises Unreadable if an import is needed."""
    source = _source(module)
    found = source.class_of(class_name)
    if name in (values := _assigned(found.body)):
        return source.value(values[name])
    for base in found.bases:
        if isinstance(base, ast.Name):
            origin, attribute = source.imported.get(base.id, (module, base.id))
            if source.is_beside(origin):
                return constant(origin, name, class_name=attribute)
    raise Unreadable(f"{module}: {name}")


def headline(module: str) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(_source(module).tree) or "").split())
    # Split at the full stop of a sentence, not at that of `et al.` or of an initial.
    return re.split(r"(?<!\bal\.)(?<!\b[A-Z]\.)(?<=\.)\s(?=[A-Z])", text, maxsplit=1)[0]


class _Source(dict[str, Any]):
    """Maps the names in a module to their values. A value is computed at its first use, from the module's source."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        super().__init__()
        self.module, self.tree, self.assigned = module, tree, _assigned(tree.body)
        self.imported: dict[str, tuple[str, str | None]] = {}  # by local name: (module, attribute), or (module, None)
        for node in tree.body:
            match node:
                case ast.Import(names=names):
                    tops = {a.name.partition(".")[0] for a in names if not a.asname}
                    self.imported |= {top: (top, None) for top in tops}
                    self.imported |= {a.asname: (a.name, None) for a in names if a.asname}
                case ast.ImportFrom(module=str(origin), names=names, level=0):
                    self.imported |= {a.asname or a.name: (origin, a.name) for a in names}

    def class_of(self, name: str | None = None) -> ast.ClassDef:
        """Return the module's one public class, or its class `name`. Raises Unreadable if there is not exactly one."""
        classes = [n for n in self.tree.body if isinstance(n, ast.ClassDef)]
        classes = [n for n in classes if (n.name == name if name else not n.name.startswith("_"))]
        if len(classes) != 1:
            raise Unreadable(f"{self.module}: expected one class {name or 'that is public'}")
        return classes[0]

    @property
    def light(self) -> bool:
        """Return whether this module imports only modules of LIGHT packages, so that it may be imported itself."""
        return all(_light(module) for module, _ in self.imported.values())

    def is_beside(self, module: str) -> bool:
        """Return whether another module is in the same top-level package."""
        return module.partition(".")[0] == self.module.partition(".")[0]

    def annotation(self, node: ast.expr | None) -> Any:
        """Return the value of an annotation. Raises Unreadable when it is missing or written as a string."""
        if node is None or isinstance(found := self.value(node), str):
            raise Unreadable(f"{self.module}: expected an annotation that is no string")
        return found

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression. Raises Unreadable if that fails."""
        try:
            return eval(compile(ast.Expression(node), self.module, "eval"), {}, self)
        except Exception as e:
            raise Unreadable(f"{self.module}:{node.lineno}: {ast.unparse(node)}") from e

    def __missing__(self, name: str) -> Any:
        if name in self.assigned:
            self[name] = self.value(self.assigned[name])
        elif name in self.imported:
            module, attribute = self.imported[name]
            if _light(module) or (attribute and self.is_beside(module) and _source(module).light):
                found = importlib.import_module(module)
                self[name] = found if attribute is None else getattr(found, attribute)
            elif attribute and self.is_beside(module):
                self[name] = _source(module)[attribute]
            else:
                raise Unreadable(f"{self.module}: {name}")
        else:
            raise KeyError(name)  # Python then looks among its built-in names
        return self[name]


def _light(module: str) -> bool:
    return any(f"{module}.".startswith(f"{light}.") for light in LIGHT)


def _assigned(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the expressions that are assigned to names in a block of statements."""
    found = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return found


@functools.cache
def _source(module: str) -> _Source:
    """Parse the source of a module. Raises Unreadable for a module without Python source."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise Unreadable(f"{module}: has no Python source")
    return _Source(module, ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
