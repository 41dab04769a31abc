"""Contexts that undo something when they are left."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """A context that calls a function when it is left by an error, which is raised on."""
    try:
        yield
    except BaseException:
        undo()
        raise


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """A context in which an attribute of an object has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
