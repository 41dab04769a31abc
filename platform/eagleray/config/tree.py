"""Loads YAML recipes and checks them against typed dataclasses; an error names the wrong key."""

import difflib
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import ArgsKwargs

from eagleray.base.errors import UserError, has_secrets, named
from eagleray.config import register, signature, yaml_text
from eagleray.config.yaml_text import validate_written

ALTERNATIVE = re.compile(r"(literal\[|constrained-|(int|float|bool|str)$)")  # pydantic's names for union members
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
LONGEST, MOST = 300, 10  # largest number of characters per key, and of keys, in one error message
T = TypeVar("T")


class RecipeError(UserError):
    """A recipe is invalid; the message names every wrong key by its dotted path and what was expected."""


def load(kind: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Load a recipe of the dataclass `kind` from a file, with `a.b=value` overrides on top. Raises RecipeError."""
    return check(kind, read(path, overrides), str(path))


def check(kind: type[T], tree: Mapping[str, Any], source: str) -> T:
    """Turn a tree of plain values into a checked, complete recipe. Raises RecipeError, which begins with `source`."""
    if path := yaml_text.find(tree, lambda value: isinstance(value, str) and has_secrets(value)):
        raise RecipeError(
            f"{source}: {path}: contains a user, password or key, which everyone who sees the run could read; give it "
            "in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if path := yaml_text.find(tree, yaml_text.is_huge):
        raise RecipeError(f"{source}: {path}: expected a number that fits into 64 bits")
    try:
        checked = validate_written(TypeAdapter[T](kind).validate_python, tree)
    except ValidationError as e:
        lines = [line if len(line) < LONGEST else f"{line[:LONGEST]} ..." for line in explain(e, kind)]
        more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
        raise RecipeError(f"{source}: " + "; ".join(lines[:MOST] + more)) from None
    if path := yaml_text.find(tree, lambda value: isinstance(value, float) and not math.isfinite(value)):
        raise RecipeError(f"{source}: {path}: expected a finite number")  # a recipe with NaN would not equal its copy
    return checked


def to_plain(recipe: object) -> dict[str, Any]:
    """Convert a resolved recipe into plain values, with its defaults."""
    return TypeAdapter(type(recipe)).dump_python(recipe, mode="json")


def chosen(recipe: object) -> dict[str, Any]:
    """Convert a resolved recipe into the plain values that differ from the defaults.

    The result stays the same when a later version adds a key with a default."""
    return TypeAdapter(type(recipe)).dump_python(recipe, mode="json", exclude_defaults=True)


def dump(recipe: object) -> str:
    """Return the resolved recipe as YAML, from which `load` reads an equal recipe."""
    return yaml_text.dump(to_plain(recipe))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into one with dotted keys: `{a: {b: 1}}` becomes `{a.b: 1}`."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return a text on the first three keys in which two flattened trees differ; "" if they are equal."""
    differ = [k for k in sorted(there.keys() | here.keys()) if there.get(k) != here.get(k)]
    more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    return ", ".join(f"{k} is {there.get(k)} there and {here.get(k)} here" for k in differ[:3]) + more


def read(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    shipped: Callable[[str], Mapping[str, Any]] | None = None,
    within: tuple[Path, ...] = (),
) -> dict[str, Any]:
    """Return the unchecked tree of a file. Its values replace those of its `base`, and the overrides replace both.

    The base is another file or the name of a shipped recipe, whose tree the function `shipped` returns. `within` are
    the files that led to this one through their `base`, so that a circle is noticed. Raises RecipeError when a file
    cannot be read, is not YAML or no mapping, or has a wrong base, and for a wrong override."""
    try:
        tree = yaml_text.parse_written(path.read_text())
    except (OSError, UnicodeDecodeError) as e:
        raise RecipeError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
    except yaml.YAMLError as e:
        raise RecipeError(f"{path}: is not YAML: " + " ".join(str(e).split())) from None
    except ValueError as e:
        raise RecipeError(f"{path}: {e}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: expected a mapping of keys to values, got a {type(tree).__name__}")
    if base := tree.pop("base", None):
        if not isinstance(base, str) or (path.parent / base).resolve() in (path.resolve(), *within):
            raise RecipeError(f"{path}: base: expected the name or the file of another recipe, got {base!r}")
        if shipped and Path(base).suffix not in (".yaml", ".yml"):
            with named(f"{path}: base"):
                under = shipped(base)
        elif not (path.parent / base).is_file():
            hint = f"; for what is shipped write base: {Path(base).stem}" if shipped else ""
            raise RecipeError(f"{path}: base: {base}: no such file{hint}")
        else:
            under = read(path.parent / base, shipped=shipped, within=(path.resolve(), *within))
        tree = merge(under, tree)
    for item in overrides:
        tree = merge(tree, override(item))
    return tree


def override(item: str) -> dict[str, Any]:
    """Turn `a.b=value`, with a YAML value, into a nested mapping. Raises RecipeError when it has another form."""
    key, equals, text = item.partition("=")
    if not equals or not all(key.split(".")):
        likely = f"data.train={item}" if "/" in item else f"{item}=VALUE" if "." in item else "optim.batch=256"
        raise RecipeError(f"{item!r}: expected key=value, such as {likely}")
    try:
        value = yaml_text.parse_written(text)
    except UnicodeEncodeError:
        raise RecipeError(f"{key}={text!a}: the name is not UTF-8, as a recipe has to be; rename it") from None
    except ValueError as e:
        raise RecipeError(f"{key}: {e}") from None
    except yaml.YAMLError:  # a brace pattern such as {00..12}, or a list of such patterns, is not YAML
        listed = text.startswith("[") and text.endswith("]")
        value = re.split(r",\s*(?![^{}]*\})", text[1:-1]) if listed else text
    comment = not isinstance(value, list | dict) and text.lstrip()[:1] not in "'\"|>" and re.search(r"(^|\s)#", text)
    if comment or (isinstance(value, dict) and not text.lstrip().startswith("{")):
        value = text  # without braces or quotes, `a: b` and `a #b` are meant as text
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees. Mappings are merged key by key; any other value of `over`, lists too, replaces that of `under`.

    A mapping with the keys 0, 1, ... changes the entries of a list of mappings: `views.1.blur=0.5`."""
    out = dict(under)
    for key, value in over.items():
        nested = isinstance(value, dict) and bool(value) and isinstance(out.get(key), dict)  # `{}` replaces a mapping
        out[key] = merge(out[key], value) if nested else value
        if isinstance(entries := under.get(key), list) and isinstance(value, dict) and value:
            names, given = [str(i) for i in range(len(entries))], {str(i): v for i, v in value.items()}
            if beyond := [i for i in given if i not in names and i.isdecimal()]:
                raise RecipeError(f"{key}.{beyond[0]}: no such entry; {key} has {len(names)}, counted from 0")
            if given.keys() <= {*names}:
                out[key] = [*merge(dict(zip(names, entries, strict=True)), given).values()]
    return out


@dataclass(frozen=True)
class Part:
    """A part of a recipe, such as its method: the class that `name` selects, and the checked arguments for it."""

    package: str
    name: str
    args: dict[str, Any]

    @property
    def target(self) -> Any:
        """Import and return the class."""
        plugin = plugin_parts(self.package).get(self.name)
        return plugin or part(self.package, self.name)

    def build(self, *positional: Any) -> Any:
        """Create an object of the class from the positional arguments and the recipe's keyword arguments."""
        return self.target(*positional, **self.args)


class _PartError(ValueError):
    """Tells the validator of the recipe which keys of a Part are wrong."""

    def __init__(self, lines: list[str], cause: ValidationError | None = None) -> None:
        super().__init__("; ".join(lines))
        self.lines, self.cause = lines, cause


def part_of(package: str) -> Any:
    """Return the type of a recipe field that selects a class, such as `method`.

    The field's `name` is a module of `package`. The field's other keys are arguments of the module's one public class:
    its keyword-only parameters, with their annotations and defaults. The parameters are read from the source, so the
    class is imported only when it is used."""

    section = section_of(package)

    def checked(spec: Any) -> Part:
        if isinstance(spec, Part):
            return spec
        spec = {"name": spec} if isinstance(spec, str) else spec
        if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
            raise _PartError([f": expected a mapping with a `name`, got {spec!r}"])
        name, args = spec["name"], {k: v for k, v in spec.items() if k != "name"}
        plugins = plugin_parts(package)
        names = sorted({*parts(package), *plugins})
        if name not in names:
            raise _PartError([f".name: unknown {name!r}{nearest(name, names)}"])
        if name in plugins and name in parts(package):
            owner = plugins[name].__module__
            raise _PartError([f".name: {name!r} already exists in eagleray; rename the one that {owner} registers"])
        model = _arguments(package, name)
        try:
            full = model.model_validate(args)
        except ValidationError as e:
            raise _PartError([f".{line}" for line in explain(e, model, f"{section}.")], e) from None
        return Part(package, name, {key: getattr(full, key) for key in model.model_fields})

    def write(part: Part, info: SerializationInfo) -> dict[str, Any]:
        args = TypeAdapter(dict[str, Any]).dump_python(part.args, mode="json", exclude_defaults=info.exclude_defaults)
        if info.exclude_defaults:
            known = _arguments(package, part.name).model_fields
            args = {key: value for key, value in args.items() if part.args[key] != known[key].default}
        return {"name": part.name, **args}

    return Annotated[Part, BeforeValidator(checked), PlainSerializer(write)]


def _arguments(package: str, name: str) -> type[BaseModel]:
    """Return a pydantic model of the arguments of the class that `name` selects in a package or among plug-ins."""
    plugin = plugin_parts(package).get(name)
    fields: Any = signature.from_import(plugin) if plugin else signature.fields(f"{package}.{name}")
    return create_model(name, __config__=STRICT, **fields)


def section_of(package: str) -> str:
    """Return the key of a recipe that selects a module of a package, such as `method` for `eagleray.methods`."""
    return package.rpartition(".")[2].removesuffix("s")


def plugin_parts(package: str) -> dict[str, type]:
    """Return the classes that plug-ins have registered for a package, by name."""
    kind: Any = section_of(package)
    return {name: entry.target for name, entry in register.entries(kind).items()}


def parts(package: str) -> list[str]:
    """Return the names that a recipe may use: all modules of the package except the base class's."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    files = Path(next(iter(spec.submodule_search_locations))).glob("*.py")
    return sorted(f.stem for f in files if f.stem not in ("__init__", package.split(".")[-1].removesuffix("s")))


def part(package: str, name: str) -> type:
    """Import a module of the package and return its one public class."""
    return signature.public_class(f"{package}.{name}")


def part_constant(package: str, name: str, constant: str) -> Any:
    """Return a class attribute of the package's class `name`, read from the source without an import where possible.

    Raises RecipeError when the package has no module of this name."""
    plugins = plugin_parts(package)
    if name in plugins:
        return getattr(plugins[name], constant)
    if name not in parts(package):
        raise RecipeError(f"{package.rpartition('.')[2]}: unknown {name!r}{nearest(name, parts(package))}")
    try:
        return signature.constant(f"{package}.{name}", constant)
    except signature.Unreadable:
        return getattr(part(package, name), constant)


def explain(error: ValidationError, kind: Any, section: str = "") -> Iterator[str]:
    """Yield one line per wrong key: its dotted path, what was expected and what was given.

    `section` is the key of the section that `kind` describes, with a dot at its end, or empty."""
    for e in join_alternatives(error.errors()):
        path = ".".join(str(p) for p in e["loc"])
        inner = e.get("ctx", {}).get("error")
        if isinstance(inner, _PartError):
            yield from (f"{path}{line}" for line in inner.lines)
        elif e["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            yield f"{path}: unknown key{nearest_key(e['loc'], kind, section)}"
        elif e["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
            yield f"{path}: missing, and it has no default"
        else:
            said = e["msg"].removeprefix("Value error, ")
            whole = isinstance(e["input"], dict | ArgsKwargs)  # a whole mapping is too long to print
            got = "" if whole else f", got {e['input']!r}"
            yield f"{path}{': ' if path else ''}{said[:1].lower()}{said[1:]}{got}"


def nearest_key(loc: Sequence[Any], kind: Any, section: str = "") -> str:
    """Return a hint for the end of an error message: the full key that was probably meant by the unknown key `loc`.

    `loc` is a path below the dataclass or model `kind`, and `section` the recipe's section that it describes, such as
    `method.`. Keys of other sections are suggested too, such as `optim.epochs` for `epochs`."""
    word, beside = str(loc[-1]), allowed_keys(kind, loc[:-1])
    if len(loc) == 1 and not section and (elsewhere := keys_named(word, kind)):
        return f"; did you mean {' or '.join(map(repr, elsewhere))}?"
    if close := difflib.get_close_matches(word, beside, 1):
        return f"; did you mean {section + ''.join(f'{step}.' for step in loc[:-1]) + close[0]!r}?"
    return nearest(word, beside)


def keys_named(word: str, kind: Any) -> list[str]:
    """Return the full keys of this name in all sections of a dataclass, such as `optim.epochs` for `epochs`."""
    sections = getattr(kind, "__dataclass_fields__", {}).values()
    owners = [f.name for f in sections if hasattr(f.type, "__dataclass_fields__") and word in allowed_keys(f.type, ())]
    return [f"{name}.{word}" for name in owners]


def join_alternatives(errors: Sequence[Any]) -> Iterator[Any]:
    """Yield pydantic's errors. Those on one key that allows several types, such as a number or `auto`, become one."""
    for (_, one_of_several), group in groupby(errors, lambda e: key_of(e["loc"])):
        first, *others = group
        if one_of_several:
            texts = [e["msg"].partition(",")[0].removeprefix("Input should be ") for e in others]
            said = " or ".join([first["msg"].partition(",")[0], *texts])
            first = {**first, "loc": first["loc"][:-1], "msg": said}
        yield first


def key_of(loc: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    """Return an error's path without the union member that pydantic may append, and whether it has appended one."""
    tagged = bool(loc) and ALTERNATIVE.match(str(loc[-1])) is not None
    return (loc[:-1], True) if tagged else (loc, False)


def allowed_keys(kind: Any, path: Sequence[Any]) -> list[str]:
    """Return the keys allowed at `path` below `kind`, a dataclass or pydantic model; none if the path does not exist.

    The elements of `path` are names of fields and, inside lists, integers."""
    for step in path:
        in_list = isinstance(step, int)
        kind = getattr(kind, "__args__", (kind,))[0] if in_list else get_type_hints(kind).get(step)
        kind = next((a for a in getattr(kind, "__args__", ()) if hasattr(a, "__dataclass_fields__")), kind)
    if kind is None:
        return []
    aliases = {name: field.alias for name, field in getattr(kind, "__pydantic_fields__", {}).items()}
    return [aliases.get(name) or name for name in get_type_hints(kind)]


def nearest(word: str, words: Sequence[str]) -> str:
    """Return a hint for the end of an error message: the word that was probably meant, or all words if they are few."""
    close = difflib.get_close_matches(word, words, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(words)}" if 0 < len(words) <= 20 else ""
