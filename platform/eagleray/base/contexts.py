"""Contexts that undo something: after an error, or at their end."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def on_error(undo: Callable[[], object]) -> Iterator[None]:
    """A context that calls `undo` when an error leaves it. The error is raised again."""
    try:
        yield
    except BaseException:
        undo()
        raise


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """A context in which the attribute `name` of `owner` is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """A context that restores PyTorch's global generators, which the caller may have seeded if PyTorch is imported."""
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        yield
