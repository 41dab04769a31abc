"""Draw inputs with hypothesis until a check fails: few in the fast suite, many new ones by `make fuzz`."""

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from random import Random
from typing import Any, TypeVar

import hypothesis
import pytest
from hypothesis import HealthCheck, strategies

from eagleray.base.errors import UserError

T = TypeVar("T")
SECONDS = 10  # that one input may take
MEMORY = 2**20  # KiB that a process may take more than before, however many inputs there are


def counts(few: int) -> list[Any]:
    """The values of a test's parameter `count`: few inputs, and None, which stands for many."""
    return [few, pytest.param(None, marks=[pytest.mark.slow, pytest.mark.campaign], id="fuzz")]


def generators(count: int | None) -> strategies.SearchStrategy[Random]:
    """Generators of random numbers. hypothesis makes what fails in the fast run shorter; a hundred thousand draws
    through it would take hours."""
    return strategies.randoms() if count else strategies.integers(0, 2**64).map(Random)


@contextlib.contextmanager
def one_line(*words: str, kind: type[Exception] = UserError, most: int = 1000) -> Iterator[None]:
    """A context in which an input may be refused, with one short line that has these words."""
    line = ""
    try:
        yield
    except kind as e:
        line = str(e) or "?"
    assert "\n" not in line
    assert len(line) < most
    assert not line or all(word in line for word in words), line


def examples(
    strategy: strategies.SearchStrategy[T], check: Callable[[T], None], count: int | None, *, many: int
) -> None:
    """Call a function with `count` inputs or else with `many`, always the same, or new ones and $FUZZ times as many."""
    settings = hypothesis.settings(
        max_examples=count or round(many * float(os.environ.get("FUZZ") or 1)),
        derandomize=count is not None or "FUZZ" not in os.environ,
        deadline=timedelta(seconds=SECONDS),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    began, calls, before = time.perf_counter(), 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings
    @hypothesis.given(strategy)
    def run(drawn: T) -> None:
        nonlocal calls
        calls += 1
        check(drawn)

    run()
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{calls} inputs in {time.perf_counter() - began:.0f} s, at most {more / 1024:.0f} MiB more memory")
    assert more < MEMORY
