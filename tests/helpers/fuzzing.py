"""Draw inputs with hypothesis until a check fails: few in the fast suite, many in the slow one."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, strategies

T = TypeVar("T")
SECONDS = 10  # that one input may take


def examples(
    strategy: strategies.SearchStrategy[T], check: Callable[[T], None], count: int | None, *, slow: int = 0
) -> None:
    """Call a function with `count` inputs, always the same, or else with $FUZZ new ones, by default `slow`."""
    settings = hypothesis.settings(
        max_examples=count or int(os.environ.get("FUZZ", slow)),
        derandomize=count is not None,
        database=None,
        deadline=timedelta(seconds=SECONDS),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    began, calls = time.perf_counter(), 0

    @settings
    @hypothesis.given(strategy)
    def run(drawn: T) -> None:
        nonlocal calls
        calls += 1
        check(drawn)

    run()
    print(f"{calls} inputs in {time.perf_counter() - began:.0f} s")
