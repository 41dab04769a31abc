"""Maps a function over items in threads, in order, and computes only a few results ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
WIDTH = 16  # concurrent calls: enough to hide the latency of an object store


def ordered_map(function: Callable[[T], R], things: Iterable[T], *, width: int = WIDTH) -> Iterator[R]:
    """Yield the results in order. Unlike with an executor's `map`, at most `width` results wait in memory."""
    with ThreadPoolExecutor(width) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for thing in things:
                if len(waiting) == width:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(copy_context().run, function, thing))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:  # nobody needs their results after an error
                future.cancel()
