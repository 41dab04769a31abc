"""Parses YAML from anywhere within bounds: recipes come with checkpoints and runs of strangers."""

from collections.abc import Callable
from typing import Any

import yaml

from eagleray.config.yaml_schema import TAG, Dumper, Loader, plain

CHARACTERS = 2**20
VALUES = 100_000  # the most values of a document with its aliases written out
DEPTH = 64  # the deepest nesting of lists and mappings
DIGITS = 100  # reading a number takes time that grows with the square of its digits
LARGEST = 2**63 - 1
NUMBERS = (f"{TAG}int", f"{TAG}float")
TAGS = {*NUMBERS, *(f"{TAG}{kind}" for kind in ("map", "seq", "str", "bool", "null"))}
DEEP = f"lists and mappings nested in each other more than {DEPTH} deep"


def parse(text: str) -> Any:
    """Return the value of a YAML text. Raises yaml.YAMLError when it is not YAML, and ValueError for a key that stands
    twice and for more than the bounds allow, before that takes memory or time."""
    return plain(parse_written(text))


def parse_written(text: str) -> Any:
    """Return the same with numbers that know how they were written, of which `validated` makes what the keys expect."""
    if len(text) > CHARACTERS:
        raise ValueError(f"{len(text):,} characters; expected at most {CHARACTERS:,}")
    _check_events(text)
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _count(node, {}, 0)) > VALUES:
            raise ValueError(f"{count:.3g} values with all aliases; expected at most {VALUES:,}")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def dump(value: Any, **options: Any) -> str:
    """Return a value as YAML, which `parse` reads as the same value. The options are PyYAML's."""
    return str(yaml.dump(value, Dumper=Dumper, **{"sort_keys": False, **options}))


def dump_line(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _check_events(text: str) -> None:
    """Read the text from its beginning to its end without building anything. Raises ValueError."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH:
            raise ValueError(DEEP)
        if number > 2 * VALUES:
            raise ValueError(f"more than {VALUES:,} values")


def _count(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Return the number of values in a tree of nodes. An alias is the same node again; its number is added up, and the
    node is not visited twice. Raises ValueError."""
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
    """Return the dotted path of the first value in a tree that passes a test, or an empty text."""
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
