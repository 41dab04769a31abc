"""Pauses between attempts that pass at once."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from eagleray.storage import retry


def of_this_test(nap: Callable[[float], None]) -> Callable[[float], None]:
    """Return a sleep that calls `nap`; a thread that an earlier test has left sleeps in earnest."""
    earlier = set(threading.enumerate()) - {threading.current_thread()}
    return lambda seconds: time.sleep(seconds) if threading.current_thread() in earlier else nap(seconds)


def pass_at_once(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the seconds that would have been slept between attempts."""
    out: list[float] = []
    clock = SimpleNamespace(sleep=of_this_test(out.append), monotonic=lambda: time.monotonic() + sum(out))
    monkeypatch.setattr(retry, "time", clock)
    return out
