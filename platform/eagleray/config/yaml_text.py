"""Reads and writes all YAML that people write, with the values of YAML 1.2's core schema (section 10.3.2).

PyYAML reads the values of YAML 1.1, where `010` is 8, `off` is false and `2026-11-29` is a date. A parsed number keeps
its text, for keys whose value is text, as in `out=1.10` and `data.train=2024`. The size of what is parsed is bounded,
because recipes come with checkpoints and runs of strangers."""

import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

TAG = "tag:yaml.org,2002:"
NULL = re.compile(r"~|null|Null|NULL|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

SCHEMA = (  # (type, pattern, first characters), tried in this order
    ("null", NULL, ["~", "n", "N", ""]),
    ("bool", BOOL, [*"tTfF"]),
    ("int", INT, [*"-+0123456789"]),
    ("float", FLOAT, [*"-+.0123456789"]),
)


class Int(int):
    """A whole number with the text that it was written as, for keys whose value is text, such as a folder `2024`."""

    text: str


class Float(float):
    """A number with the text that it was written as: the folder `1.10` is not the folder `1.1`."""

    text: str


# The loader of libyaml is ten times faster than PyYAML's own.
class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Builds the values of the core schema, with numbers as Int and Float, and refuses duplicate keys."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # YAML 1.1's types and merge keys (`<<`) are off

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a node's mapping. Raises ValueError for a list or mapping as a key, and for duplicate keys."""
        lines: dict[Any, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, list | dict):
                raise ValueError(f"line {line}: a list or mapping is no key; expected text")
            if key in lines:
                where = f"lines {lines[key]} and {line}" if line > lines[key] else f"line {line}"
                raise ValueError(f"{key}: stands twice, in {where}; expected it once")
            lines[key] = line
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


# Has the resolvers of YAML 1.1 and 1.2, so that text which either version would read as another type is quoted.
class YamlDumper(yaml.SafeDumper):
    """Writes YAML that YamlLoader and loaders of YAML 1.1 read as the same value."""


def _null(loader: Any, node: yaml.ScalarNode) -> None:
    _matching(loader, node, NULL)


def _bool(loader: Any, node: yaml.ScalarNode) -> bool:
    return _matching(loader, node, BOOL).lower() == "true"


def _int(loader: Any, node: yaml.ScalarNode) -> Int:
    text = _matching(loader, node, INT)
    value = Int(text[2:], {"0o": 8, "0x": 16}[text[:2]]) if text[:2] in ("0o", "0x") else Int(text)
    value.text = text
    return value


def _float(loader: Any, node: yaml.ScalarNode) -> Float:
    text = _matching(loader, node, FLOAT)
    value = Float(re.sub(r"\.(?=[inIN])", "", text))  # Python's inf and nan have no dot
    value.text = text
    return value


def _matching(loader: Any, node: yaml.ScalarNode, pattern: re.Pattern[str]) -> str:
    """Return the text of a scalar. Raises ValueError when the text does not fit the scalar's tag, as in `!!int x`."""
    text = str(loader.construct_scalar(node))
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r}: not a value of the type {node.tag.removeprefix(TAG)}")
    return text


def _write_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # Without quotes, PyYAML would turn these line ends, which YAML 1.2 does not have, into blanks.
    return dumper.represent_scalar(f"{TAG}str", value, style='"' if re.search("[\x85\u2028\u2029]", value) else None)


def _write_number(dumper: yaml.SafeDumper, value: Any) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{TAG}{'int' if isinstance(value, int) else 'float'}", value.text)


def _register() -> None:
    construct = {"null": _null, "bool": _bool, "int": _int, "float": _float}
    for kind, pattern, firsts in SCHEMA:
        whole = re.compile(rf"(?:{pattern.pattern})\Z")
        YamlLoader.add_constructor(f"{TAG}{kind}", construct[kind])
        for resolver in (YamlLoader, YamlDumper):
            resolver.add_implicit_resolver(f"{TAG}{kind}", whole, firsts)
    YamlDumper.add_representer(str, _write_text)
    for number in (Int, Float):
        YamlDumper.add_representer(number, _write_number)


_register()


def plain(value: Any, texts: frozenset[int] = frozenset()) -> Any:
    """Return a tree with int and float in place of Int and Float, or with their text if their id is in `texts`."""
    if isinstance(value, Int | Float):
        if id(value) in texts:
            return value.text
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, dict):
        return {plain(k, texts): plain(v, texts) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(v, texts) for v in value)
    return value


CHARACTERS = 2**20
VALUES = 100_000  # largest number of values in a document, where each alias counts as a copy
DEPTH = 64  # largest number of levels of nested lists and mappings
DIGITS = 100  # largest length of a number: the time to read it grows with the square of its length
LARGEST = 2**63 - 1
NUMBERS = (f"{TAG}int", f"{TAG}float")
TAGS = {*NUMBERS, *(f"{TAG}{kind}" for kind in ("map", "seq", "str", "bool", "null"))}
DEEP = f"lists and mappings nested in each other more than {DEPTH} deep"


def parse(text: str) -> Any:
    """Return the value of a YAML text. Raises yaml.YAMLError when it is not YAML.

    Raises ValueError for a duplicate key and, before values are built, for text beyond the limits above."""
    return plain(parse_written(text))


def parse_written(text: str) -> Any:
    """Return what `parse` returns, but with numbers that keep their text, as `validate_written` needs them."""
    if len(text) > CHARACTERS:
        raise ValueError(f"{len(text):,} characters; expected at most {CHARACTERS:,}")
    _check_events(text)
    loader = YamlLoader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    if (count := _count(node, {}, 0)) > VALUES:
        raise ValueError(f"{count:.3g} values with all aliases; expected at most {VALUES:,}")
    return loader.construct_document(node)


def dump(value: Any, **options: Any) -> str:
    """Return a value as YAML, which `parse` reads as the same value. The options are PyYAML's."""
    return str(yaml.dump(value, Dumper=YamlDumper, **{"sort_keys": False, **options}))


def dump_line(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _check_events(text: str) -> None:
    """Read a text to its end without building anything. Raises ValueError for too deep a nesting or too many values."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, YamlLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH:
            raise ValueError(DEEP)
        if number > 2 * VALUES:
            raise ValueError(f"more than {VALUES:,} values")


def _count(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Return the number of values in a tree of nodes, where each alias counts as much as the node that it repeats.

    A node is visited only once. Raises ValueError for too deep a nesting, an unknown tag or too long a number."""
    if depth > DEPTH:
        raise ValueError(f"{DEEP}, or an alias of what it is in")
    if node.tag not in TAGS:
        raise ValueError(f"{node.tag}: not a kind of value that is used here")
    if node.tag in NUMBERS and len(node.value) > DIGITS:
        raise ValueError(f"a number of {len(node.value):,} characters; expected at most {DIGITS}")
    if id(node) not in known:
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        each = (n for child in children for n in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = 1 + sum(_count(child, known, depth + 1) for child in each)
    return known[id(node)]


def find(tree: Any, test: Callable[[Any], bool], path: str = "") -> str:
    """Return the dotted path of the first value in a tree that passes a test; an empty text if there is none."""
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return path if test(tree) else ""
    return next(filter(None, (find(v, test, f"{path}.{k}".lstrip(".")) for k, v in items)), "")


def is_huge(value: Any) -> bool:
    """Return whether a value is a whole number that does not fit into 64 bits."""
    return isinstance(value, int) and abs(value) > LARGEST


T = TypeVar("T")
TEXT = ("string_type", "path_type")  # pydantic's error types for a number where text is expected
OTHER_KINDS = (*TEXT, "tuple_type", "list_type", "dict_type", "dataclass_type", "none_required", "literal_error")


def validate_written(validate: Callable[[Any], T], tree: Any) -> T:
    """Validate a tree that `parse_written` has read, with a function of pydantic, and return the function's result.

    Only pydantic knows which keys expect text. Where it reports a number in place of text, the tree is validated again
    with the text of that number as it was written. Raises ValidationError when the tree does not fit the types."""
    try:
        return validate(plain(tree))
    except ValidationError:
        texts = _texts(validate, tree)
        if not texts:
            raise
    return validate(plain(tree, texts))


def plain_tree(kind: Any, tree: Any) -> Any:
    """Return a tree, valid or not, with plain numbers or, where the dataclass `kind` expects text, with their text."""
    return plain(tree, _texts(TypeAdapter(kind).validate_python, tree))


def _texts(validate: Callable[[Any], Any], tree: Any) -> frozenset[int]:
    """Return the ids of the numbers in a tree whose keys expect text."""
    try:
        validate(tree)
    except ValidationError as e:
        return _expected_texts(e)
    return frozenset()


def _expected_texts(error: ValidationError) -> frozenset[int]:
    kinds: dict[int, set[str]] = {}
    for line in _lines(error):
        if isinstance(line["input"], Int | Float):
            kinds.setdefault(id(line["input"]), set()).add(line["type"])
    # For a key that also allows numbers, such as `int | str`, a number that is too small does not become text.
    return frozenset(i for i, found in kinds.items() if found & {*TEXT} and found <= {*OTHER_KINDS})


def _lines(error: ValidationError) -> Iterator[Any]:
    for line in error.errors():
        inner = getattr(line.get("ctx", {}).get("error"), "cause", None)  # the error of a Part's own model
        yield from _lines(inner) if isinstance(inner, ValidationError) else [line]
