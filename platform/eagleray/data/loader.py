"""Loads batches: worker processes read and crop, and the device applies colour operations, one batch ahead.

If the device is the CPU, the worker processes apply the colour operations, too."""

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from eagleray.base import devices, fork_server
from eagleray.config.channels import planes
from eagleray.data.batch import Batch
from eagleray.data.loader_processes import LoaderWatch, in_one_line, loaded
from eagleray.data.order import Share, rank_rows, rows
from eagleray.data.packed import MOST, Crops, Packer, on_device, packs
from eagleray.data.quarantine import BadSample
from eagleray.data.reader import StepPart, Stream, pixel_buffer, size_groups
from eagleray.data.shared_lane import Leader, SharedLane
from eagleray.views import photometric, sampling
from eagleray.views.crop_batch import crop_batch
from eagleray.views.sampling import EXTRA_WIDTH, NEW_WIDTH, WIDTH

T = TypeVar("T")
POLL = 0.5  # seconds between calls of `should_stop`
LAST = 10.0  # seconds to wait at the end for the step that is being read


class Loader:
    """Loads one rank's rows of every global batch, with any number of loader processes (`workers`).

    With `compiled`, colour jitter on an accelerator is compiled. `crops` says where images are cropped, which does not
    change the pixels. Raises UserError when there are more ranks than images in a step, or the device cannot crop."""

    def __init__(
        self,
        stream: Stream,
        *,
        rank: int,
        ranks: int,
        workers: int,
        device: torch.device,
        compiled: bool = False,
        crops: Crops = "auto",
    ) -> None:
        views = [views for phase in (stream.views, *dict(stream.phases).values()) for views in phase.views]
        packed = packs(crops, views, device)
        self.stream, self.compiled = replace(stream, colours=device.type == "cpu", packed=packed), compiled
        self.rank, self.workers, self.device = rank, workers, device
        self.waited = 0.0  # seconds that `batches` has waited for readers
        self.rows = rows(stream.lanes, stream.batch, ranks=ranks)
        own, many = rank_rows(stream.lanes, stream.batch, rank=rank, ranks=ranks), max(workers, 1)
        self.shares = [Share(own, stream.batch // stream.lanes, reader, many) for reader in range(many)]

    def batches(
        self, start: int, stop: int | None = None, *, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Batch, list[BadSample]]]:
        """Yield the batch of each step from `start` on, with the broken samples that were found while it was read.

        It ends before the step `stop` (None: never), or when `should_stop`, which is called while waiting for a batch,
        returns true. Raises UserError or Outage when a reader cannot go on."""
        with in_one_line():  # its semaphores lie in shared memory
            dataset = _PartDataset(self.stream, self.shares, start, stop)
        ahead, pinned = self._steps_ahead() if self.workers else None, devices.has_streams(self.device)
        with (
            loaded(dataset, self.workers, prefetch_factor=ahead, pin_memory=pinned) as (parts, processes),
            LoaderWatch(processes, self.stream.patience) as watch,
            contextlib.closing(dataset),
        ):
            steps = self._timed(_interruptible(self._in_steps(parts, start), should_stop, watch.look))
            yield from (_one_batch_ahead(steps, self) if pinned else map(self.assemble, steps))

    def _steps_ahead(self) -> int:
        """Return how many steps a loader process may be ahead: 2 or, if processes take turns with different numbers of
        rows, so many that each process reads rows in some of these steps."""
        many, own = len(self.shares), len(self.shares[0].own)
        return 2 if own % many == 0 or not self.shares[0].takes_turns else 2 + 2 * math.ceil(many / own)

    def _in_steps(self, parts: Iterator[StepPart], start: int) -> Iterator[tuple[StepPart, ...]]:
        """Yield the parts of each step, one per reader, sorted by their rows. A part with an error is yielded alone, as
        the other parts of its step may never come."""
        for step in itertools.count(start):
            of_step: list[StepPart] = []
            for part in itertools.islice(parts, len(self.shares)):
                of_step.append(part)
                if part.error:
                    yield (part,)
            if len(of_step) < len(self.shares):
                return
            yield tuple(self.shares[0].in_order(of_step, step))

    def _timed(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the steps, and add the time spent waiting for them to `waited`."""
        while True:
            asked = time.perf_counter()
            step = next(steps, None)
            self.waited += time.perf_counter() - asked
            if step is None:
                return
            yield step

    def heaviest(self) -> StepPart:
        """Return a part with all of this rank's rows that takes the most memory of the device: its images are as large
        as they may be, and its views have every operation that the recipe allows."""
        views, rows, channels = self.stream.views, self.rows[self.rank], planes(self.stream.index.channels)
        lowest, more = (np.zeros((rows, len(views.views), width)) for width in (WIDTH, EXTRA_WIDTH + NEW_WIDTH))
        params = torch.from_numpy(sampling.photometrics(views, lowest, more).swapaxes(0, 1).copy())
        part = StepPart([], params, torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long))
        if not self.stream.packed:
            part.pixels = [pixel_buffer(n, rows, channels, size, size) for n, size in size_groups(views)]
            return part
        packer, side = Packer(views, channels), math.isqrt(int(MOST * (views.size**2).sum()))
        packer.begin(views, rows)
        for _ in range(rows):
            image = torch.zeros(channels, side, side, dtype=torch.uint8)
            packer.add(image, np.tile([0, 0, side, side], (len(views.views), 1)))
        part.packed = packer.end(pixel_buffer)
        return part

    def assemble(self, parts: tuple[StepPart, ...]) -> tuple[Batch, list[BadSample]]:
        """Join the parts of a step, one per reader, on the device. Raises the error that a part carries."""
        for part in parts:
            if part.error:
                raise part.error
        params = torch.cat([p.params for p in parts], 1)  # (V, B, P), stays on the CPU
        views: list[Tensor] = []
        finish = photometric.finish if self.stream.colours else partial(photometric.apply, compiled=self.compiled)
        for pixels in self._crops(parts):
            here = params[len(views) : len(views) + len(pixels)]
            views += finish(pixels.flatten(0, 1), here.flatten(0, 1)).unflatten(0, pixels.shape[:2]).unbind()
        batch = Batch(
            views=views,
            index=torch.cat([p.index for p in parts]).to(self.device, non_blocking=True),
            label=torch.cat([p.label for p in parts]).to(self.device, non_blocking=True),
            rows=self.rows,
            boxes=self._boxes(parts),
        )
        return batch, [bad for part in parts for bad in part.bad]

    def _crops(self, parts: tuple[StepPart, ...]) -> Iterator[Tensor]:
        """Yield the crops (views, B, 3, S, S) of each group of views on the device. If the stream is packed, the device
        makes them from the decoded images."""
        if not self.stream.packed:
            for group in zip(*[p.pixels for p in parts], strict=True):
                yield torch.cat([g.to(self.device, non_blocking=True) for g in group], 1)
            return
        packed = on_device([p.packed for p in parts if p.packed], self.device)
        views, first = self.stream.views_at(parts[0].step), 0
        for count, _ in size_groups(views):
            here = slice(first, first + count)
            yield crop_batch(packed.pixels, packed.boxes[here], views.views[here])
            first += count

    def _boxes(self, parts: tuple[StepPart, ...]) -> Tensor | None:
        """Join the boxes of a step's parts to (V, B, 4) on the device. Return None if the stream has no boxes."""
        boxes = [part.boxes for part in parts if part.boxes is not None]
        return torch.cat(boxes, 1).to(self.device, non_blocking=True) if boxes else None


class _PartDataset(IterableDataset[StepPart]):
    """Yields one reader's images of every step as a StepPart.

    The reader is this process, or the loader process that iterates over the data set."""

    def __init__(self, stream: Stream, shares: list[Share], start: int, stop: int | None) -> None:
        self.stream, self.shares, self.start, self.stop = stream, shares, start, stop
        turns = len(shares) > 1 and shares[0].takes_turns
        self.over = fork_server.CONTEXT.Event() if turns else None  # set when no more batches are read
        self.lanes = {
            lane: SharedLane(n % len(shares), len(shares)) for n, lane in enumerate(shares[0].lanes if turns else ())
        }

    def __iter__(self) -> Iterator[StepPart]:
        info = get_worker_info()
        reader = info.id if info else 0
        ends = {number: lane.end_of(reader) for number, lane in self.lanes.items()}
        yield from self.stream.parts(self.shares[reader], start=self.start, stop=self.stop, ends=ends)
        for end in sorted(ends.values(), key=lambda end: isinstance(end, Leader)):  # leaders last: they wait for others
            end.finish(self.over)

    def close(self) -> None:
        """Let the readers end that lead a lane and wait for the other readers of the lane."""
        if self.over:
            self.over.set()


def _interruptible(steps: Iterator[T], should_stop: Callable[[], bool], look: Callable[[float], None]) -> Iterator[T]:
    """Yield the steps, which another thread reads, so that `should_stop` is called even while a store does not answer.
    `look` gets the seconds for which the next step has been waited for, and may raise an error."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
    requests, over = threading.Semaphore(1), threading.Event()

    def work() -> None:
        while requests.acquire() and not over.is_set():
            try:
                ready.put((next(steps), None))
            except BaseException as e:  # includes StopIteration
                ready.put((None, e))

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    asked = time.monotonic()
    try:
        while True:
            try:
                step, error = ready.get(timeout=POLL)
            except queue.Empty:
                if should_stop():
                    return
                look(time.monotonic() - asked)
                continue
            if isinstance(error, StopIteration):
                return
            if error:
                raise error
            requests.release()  # the next step is read while this one is used
            yield step  # type: ignore[misc]
            asked = time.monotonic()
    finally:
        over.set()
        requests.release()
        thread.join(LAST)


def _one_batch_ahead(steps: Iterator[tuple[StepPart, ...]], loader: Loader) -> Iterator[tuple[Batch, list[BadSample]]]:
    """Copy and prepare the next batch on a second stream of the device while the current one is trained on."""
    side = torch.Stream(loader.device)
    ready: tuple[Any, torch.Event] | None = None
    for parts in steps:
        with side:
            loaded = loader.assemble(parts), side.record_event()
        if ready:
            yield _hand_over(*ready)
        ready = loaded
    if ready:
        yield _hand_over(*ready)


def _hand_over(loaded: tuple[Batch, list[BadSample]], done: torch.Event) -> tuple[Batch, list[BadSample]]:
    """Make the training stream wait for the batch, and keep the batch's memory until that stream no longer uses it."""
    stream = torch.accelerator.current_stream()
    stream.wait_event(done)
    batch = loaded[0]
    for tensor in (*batch.views, batch.index, batch.label, batch.boxes):
        if tensor is not None:
            tensor.record_stream(stream)  # type: ignore[arg-type]
    return loaded
