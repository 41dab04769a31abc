"""Repeats requests that fail temporarily: by throttling, resets, stalls or a restarting server."""

import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from eagleray.base.errors import Outage, UserError

log = logging.getLogger(__name__)
T = TypeVar("T")
PATIENCE = 10.0  # seconds of retries while a person waits
FIRST, LONGEST = 0.1, 15.0  # seconds between attempts, at first and at most
QUIET = 5.0  # seconds of failure before the first warning; this pause doubles after each of the first four warnings
_random = random.SystemRandom()  # the system's generator, as forked loader processes would share a seed


_least = ContextVar[float]("least", default=0.0)


@contextlib.contextmanager
def at_least(patience: float) -> Iterator[None]:
    """A context that repeats failed requests of this thread, and of `ordered_map` in it, for at least `patience`
    seconds. It is for work of hours, which an error would end, and for which no person waits."""
    before = _least.set(patience)
    try:
        yield
    finally:
        _least.reset(before)


class Transient(Exception):
    """A failure that may be temporary. Its message is the reason in one line."""


def call_with_retries(url: str, attempt: Callable[[], T], *, patience: float) -> T:
    """Call `attempt` until it does not raise Transient, and return its result.

    The pauses between calls double and vary at random, so that readers that failed together do not retry together.
    Raises Outage after `patience` seconds, or after those of `at_least` if these are more."""
    patience = max(patience, _least.get())
    began = warned = time.monotonic()
    warnings = 0
    for number in itertools.count():
        try:
            return attempt()
        except Transient as e:
            problem = str(e)
        pause = min(FIRST * 2.0 ** min(number, 16), LONGEST) * _random.uniform(0.5, 1)
        now = time.monotonic()
        if now + pause > began + patience:
            break
        if now - warned > QUIET * 2 ** min(warnings, 4):
            log.warning("%s: %s; tried %d times in %.0f s", url, problem, number + 1, now - began)
            warned, warnings = now, warnings + 1
        time.sleep(pause)
    raise Outage(f"{url}: {problem}; given up after {number + 1} attempts in {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def answering(patience: float) -> Iterator[None]:
    """A context for the first request to a store.

    If the store does not answer a command that a person waits for, UserError is raised, as the address is probably
    wrong. A run, which has more `patience` and has read from the store before, gets Outage."""
    try:
        yield
    except Outage as e:
        if patience > PATIENCE:
            raise
        raise UserError(f"{e}; is the address right?") from None
