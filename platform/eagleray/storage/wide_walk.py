"""Lists a folder of a store with many concurrent requests, by dividing its names into spans during the listing.

How the names are distributed is unknown, so an idle thread takes over the second half of the unlisted rest of the span
that has yielded most files. The middle is computed from the characters of the span's ends. If no names lie behind the
middle, one request shows this, and the next middle is nearer. Each name is always in exactly one span."""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass

from eagleray.storage.blob import Blob
from eagleray.storage.store import store

WIDTH = 16  # concurrent listings
BATCH = 1000  # files per batch: a page of S3
TRIES = 64  # number of spans that may be split off, plus one per full batch; it bounds the number of requests
LOW, HIGH = 0x20, 0x7E  # smallest and largest character code that `middle` inserts
Names = tuple[str, str]  # bounds of a span: names after the first, up to and with the second; empty: no bound
WHOLE: Names = ("", "")


@dataclass(eq=False)
class _Span:
    after: str  # names up to this one have been yielded
    stop: str  # upper bound of the span's names; empty: none
    seen: str  # names up to this one have been listed
    batches: int = 0  # number of batches listed so far


class Disordered(Exception):
    """The error for a store that does not list in the order of names."""


def wide_walk(url: str, left: Sequence[Names]) -> Iterator[tuple[list[Blob], list[Names]]]:
    """Yield the files in the spans `left` of a folder in batches, each with the spans that are left after it.

    WHOLE is the span of all names. A store that can only list from the beginning lists all names, whatever `left` is.
    Raises UserError, Outage, and Disordered for a store that does not list in the order of names."""
    if store(url).seeks:
        yield from _WideWalk(url, left)
        return
    blobs = store(url).walk(url)
    while batch := list(itertools.islice(blobs, BATCH)):
        yield batch, [WHOLE]
    yield [], []


class _WideWalk:
    def __init__(self, url: str, left: Sequence[Names]) -> None:
        self.root = url.rstrip("/") + "/"
        self.store = store(url)
        self.waiting = deque(_Span(after, stop, after) for after, stop in left)
        self.live = list(self.waiting)  # spans of which not all files have been yielded
        self.active: list[_Span] = []
        self.tries = TRIES
        self.results: queue.Queue[tuple[_Span, list[Blob], bool] | BaseException] = queue.Queue(2 * WIDTH)
        self.over = False
        self.changed = threading.Condition()

    def __iter__(self) -> Iterator[tuple[list[Blob], list[Names]]]:
        for _ in range(WIDTH):
            threading.Thread(target=copy_context().run, args=(self._work,), name="list", daemon=True).start()
        try:
            while self.live:
                got = self.results.get()
                if isinstance(got, BaseException):
                    raise got
                span, blobs, last = got
                with self.changed:
                    span.after = self._name(blobs[-1]) if blobs else span.after
                    if last:
                        self.live.remove(span)
                    left = [(s.after, s.stop) for s in self.live]
                yield blobs, left
        finally:
            with self.changed:
                self.over = True
                self.changed.notify_all()

    def _name(self, blob: Blob) -> str:
        return blob.url.removeprefix(self.root)

    def _work(self) -> None:
        try:
            while span := self._take():
                self._list(span)
        except BaseException as e:
            self._put(e)

    def _take(self) -> _Span | None:
        """Wait for a span to list, and return it. Return None when there will be no more spans."""
        with self.changed:
            while not self.over:
                if not self.waiting:
                    self._halve()
                if self.waiting:
                    self.active.append(self.waiting.popleft())
                    return self.active[-1]
                if not self.active:
                    break
                self.changed.wait()
            self.changed.notify_all()
        return None

    def _halve(self) -> None:
        for span in sorted(self.active, key=lambda s: -s.batches):
            # A span without two full batches is probably almost done.
            if span.batches > 1 and self.tries and (between := middle(span.seen, span.stop)):
                self.tries -= 1
                new = _Span(between, span.stop, between)
                span.stop = between
                self.waiting.append(new)
                self.live.append(new)
                return

    def _list(self, span: _Span) -> None:
        batch: list[Blob] = []
        before = span.seen
        for blob in self.store.walk(self.root, self.root + before if before else ""):
            if (name := self._name(blob)) <= before:
                raise Disordered
            before = name
            batch.append(blob)
            if len(batch) == BATCH:
                if self._hand_over(span, batch, last=False):
                    return
                batch = []
        self._hand_over(span, batch, last=True)

    def _hand_over(self, span: _Span, batch: list[Blob], *, last: bool) -> bool:
        """Queue those files of a batch that are in the span, and return whether the span ends there."""
        with self.changed:
            mine = [blob for blob in batch if not span.stop or self._name(blob) <= span.stop]
            last = last or len(mine) < len(batch) or self.over
            if mine:
                span.seen, span.batches = self._name(mine[-1]), span.batches + 1
            self.tries += len(mine) == BATCH
            if last:
                self.active.remove(span)
            self.changed.notify_all()
        self._put((span, mine, last))
        return last

    def _put(self, result: tuple[_Span, list[Blob], bool] | BaseException) -> None:
        while not self.over:
            try:
                return self.results.put(result, timeout=0.1)
            except queue.Full:
                continue


def middle(low: str, high: str) -> str:
    """Return a text between `low` and `high`, about halfway by character codes, or "" if there is none. An empty `high`
    is above everything."""
    out, bounded = "", bool(high)
    for at in range(len(low) + 1):
        one = min(max(ord(low[at]), LOW - 1), HIGH) if at < len(low) else LOW - 1
        other = min(ord(high[at]) if at < len(high) else LOW - 1, HIGH + 1) if bounded else HIGH + 1
        if other - one > 1:
            found = out + chr((one + other) // 2)
            return found if low < found and (not high or found < high) else ""
        out += low[at : at + 1]
        bounded = bounded and at < len(high) and at < len(low) and low[at] == high[at]
    return ""
