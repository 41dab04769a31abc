"""Where the time of `engine.loop.fit` goes: its own calls, timed where they are made."""

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from eagleray.base import devices
from eagleray.engine import loop
from eagleray.methods.method import Method

PARTS = ("forward", "backward", "clip", "optimizer", "ema")


class Clock:
    """Time inside named calls; what a call inside another takes is its own and not the outer one's."""

    def __init__(self, device: torch.device) -> None:
        self.queued = devices.is_accelerator(device)
        self.device = device
        self.open: list[str] = []
        self.spans: dict[str, list[tuple[Any, Any, int]]] = defaultdict(list)  # begin, end, sign

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, begin = self.open[-1:], self._now()
            self.open.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.open.pop()
                end = self._now()
                self.spans[name].append((begin, end, 1))
                for other in outer:
                    self.spans[other].append((begin, end, -1))

        return timed

    def seconds(self, name: str) -> float:
        spans = self.spans[name]
        return sum(
            sign * (begin.elapsed_time(end) / 1000 if self.queued else end - begin) for begin, end, sign in spans
        )

    def _now(self) -> Any:
        if not self.queued:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


@contextmanager
def patched(clock: Clock, method: Method, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The calls that `fit` makes, timed; an EMA is its own part wherever the method updates it."""
    calls: dict[str, tuple[object, str]] = {
        "forward": (method, "forward"),
        "backward": (torch.Tensor, "backward"),
        "clip": (loop, "clip_"),
        "optimizer": (optimizer, "step"),
    }
    module = sys.modules[type(method).__module__]
    if hasattr(module, "ema_update"):
        calls["ema"] = module, "ema_update"
    with ExitStack() as stack:
        for name, (owner, attribute) in calls.items():
            timed = clock.around(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, timed))
        yield
