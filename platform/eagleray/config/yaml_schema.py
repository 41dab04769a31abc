"""The loader and the dumper of all YAML that people write: values are those of YAML 1.2's core schema (section 10.3.2).

PyYAML's own are those of YAML 1.1, where `010` is 8, `off` is false and `2026-11-29` is a date.
"""

import re
from typing import Any, ClassVar

import yaml

TAG = "tag:yaml.org,2002:"
NULL = re.compile(r"~|null|Null|NULL|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

SCHEMA = (  # patterns are tried in this order where a value begins with one of the characters
    ("null", NULL, ["~", "n", "N", ""]),
    ("bool", BOOL, [*"tTfF"]),
    ("int", INT, [*"-+0123456789"]),
    ("float", FLOAT, [*"-+.0123456789"]),
)


class Int(int):
    """A whole number that knows how it was written, for a key whose value is text: `2024` is a folder's name, too."""

    text: str


class Float(float):
    """A number that knows how it was written: the folder `1.10` is not the folder `1.1`."""

    text: str


# libyaml's is ten times faster.
class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Builds the values of the core schema, with numbers as Int and Float, and refuses a key that stands twice."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # those of YAML 1.1 and `<<` are left out

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises ValueError for a key that stands twice, with both lines."""
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


# The resolvers of both schemas, so that a text that either would read as something else is written in quotes.
class Dumper(yaml.SafeDumper):
    """Writes what the loader, and also one of YAML 1.1, reads as the same value."""


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
    """Return the text of a scalar. Raises ValueError where a tag, as in `!!int x`, says what the text is not."""
    text = str(loader.construct_scalar(node))
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r}: not a value of the type {node.tag.removeprefix(TAG)}")
    return text


def _write_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML would fold these ends of a line, which YAML 1.2 does not have, into blanks.
    return dumper.represent_scalar(f"{TAG}str", value, style='"' if re.search("[\x85\u2028\u2029]", value) else None)


def _write_number(dumper: yaml.SafeDumper, value: Any) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{TAG}{'int' if isinstance(value, int) else 'float'}", value.text)


def _register() -> None:
    construct = {"null": _null, "bool": _bool, "int": _int, "float": _float}
    for kind, pattern, firsts in SCHEMA:
        whole = re.compile(rf"(?:{pattern.pattern})\Z")
        Loader.add_constructor(f"{TAG}{kind}", construct[kind])
        for resolver in (Loader, Dumper):
            resolver.add_implicit_resolver(f"{TAG}{kind}", whole, firsts)
    Dumper.add_representer(str, _write_text)
    for number in (Int, Float):
        Dumper.add_representer(number, _write_number)


_register()


def plain(value: Any, texts: frozenset[int] = frozenset()) -> Any:
    """Return a tree with Python's own numbers, or, for those whose id is in `texts`, the text that was written."""
    if isinstance(value, Int | Float):
        if id(value) in texts:
            return value.text
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, dict):
        return {plain(k, texts): plain(v, texts) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(v, texts) for v in value)
    return value
