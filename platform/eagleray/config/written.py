"""Gives a key of text what was written where YAML sees a number, as in `out=1.10` and `data.train=2024`."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from eagleray.config.yaml_schema import Float, Int, plain

T = TypeVar("T")
TEXT = ("string_type", "path_type")  # pydantic's names of what is wrong with a number where text is expected
OTHER_KINDS = (*TEXT, "tuple_type", "list_type", "dict_type", "dataclass_type", "none_required", "literal_error")


def validated(validate: Callable[[Any], T], tree: Any) -> T:
    """Return what pydantic's function makes of a tree that `parse_written` has read.

    The types decide what is text, and only pydantic knows them: where it expects text and got a number, it gets the
    number as it was written. Raises ValidationError.
    """
    try:
        return validate(plain(tree))
    except ValidationError:
        texts = _texts(validate, tree)
        if not texts:
            raise
    return validate(plain(tree, texts))


def settled(kind: Any, tree: Any) -> Any:
    """Return a tree for a dataclass `kind` with plain numbers, and with text where its keys expect it. The tree need
    not be valid."""
    return plain(tree, _texts(TypeAdapter(kind).validate_python, tree))


def _texts(validate: Callable[[Any], Any], tree: Any) -> frozenset[int]:
    """Return the ids of the numbers of a tree that are text by the types of their keys."""
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
    # A number that is merely too small for one alternative of its key, `int | str`, stays one.
    return frozenset(i for i, found in kinds.items() if found & {*TEXT} and found <= {*OTHER_KINDS})


def _lines(error: ValidationError) -> Iterator[Any]:
    for line in error.errors():
        inner = getattr(line.get("ctx", {}).get("error"), "cause", None)  # a part has a model of its own
        yield from _lines(inner) if isinstance(inner, ValidationError) else [line]
