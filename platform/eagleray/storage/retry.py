"""Retries of requests that fail for a while: throttling, resets, stalls, a server that restarts."""

import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from eagleray.base.errors import Outage

log = logging.getLogger(__name__)
T = TypeVar("T")
PATIENCE = 10.0  # seconds, for what a person waits for
FIRST, LONGEST = 0.1, 15.0  # seconds between attempts
QUIET = 5.0  # seconds before anybody is told
_random = random.Random()  # not the global one, which a loader process seeds alike in every epoch


class Transient(Exception):
    """A failure that may pass, with its reason in one line."""


def call_with_retries(url: str, attempt: Callable[[], T], *, patience: float) -> T:
    """Call `attempt` until it does not raise Transient, and return its result.

    The pauses between calls double and differ at random, so that readers that failed together do not return together.
    Raises Outage after `patience` seconds.
    """
    began = told = time.monotonic()
    for number in itertools.count():
        try:
            return attempt()
        except Transient as e:
            problem = str(e)
        pause = min(FIRST * 2**number, LONGEST) * _random.uniform(0.5, 1)
        now = time.monotonic()
        if now + pause > began + patience:
            break
        if now - told > QUIET * 2 ** min(number, 4):
            log.warning("%s: %s; tried %d times in %.0f s", url, problem, number + 1, now - began)
            told = now
        time.sleep(pause)
    raise Outage(f"{url}: {problem}; given up after {number + 1} attempts in {time.monotonic() - began:.0f} s")
