"""Reads, decodes and crops one reader's samples of every batch, and replaces broken samples."""

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from eagleray.base.errors import Outage, UserError, explained
from eagleray.config.channels import planes
from eagleray.data.blocks import Block, Fetcher
from eagleray.data.decode import BadImage
from eagleray.data.decode_crops import Boxes, check_scaled, decode_boxes
from eagleray.data.index import Index
from eagleray.data.order import Epoch, Lane, Run, Share, lane_length
from eagleray.data.packed import Packed, Packer
from eagleray.data.quarantine import BadSample
from eagleray.data.selection import Selection, Visits, visits_of
from eagleray.data.shared_lane import Follower, Leader, shared_memory
from eagleray.storage.block_cache import Cache
from eagleray.storage.retry import PATIENCE
from eagleray.views import photometric, photometric_cpu, sampling
from eagleray.views.crop import crop
from eagleray.views.operations import augment, operate
from eagleray.views.sampling import Views

Ends = Mapping[int, Leader | Follower]  # this reader's end of each shared lane, by the lane's index


@dataclass
class StepPart:
    """One reader's part of a step: b images in V views. Neighbouring views of one size form one of G groups."""

    pixels: list[Tensor]  # crops, G tensors (views of the group, b, 3, S, S) uint8; empty where the device crops
    params: Tensor  # (V, b, P) parameters of operations, see views.sampling
    index: Tensor  # (b,) position of each image in the data set
    label: Tensor  # (b,) class of each image; -1: none
    boxes: Tensor | None = None  # (V, b, 4), see Batch; None: not asked for
    step: int = 0
    packed: Packed | None = None  # decoded images that the device crops
    bad: list[BadSample] = field(default_factory=list)
    error: UserError | Outage | None = None  # why the reader cannot continue

    def pin_memory(self) -> "StepPart":
        """Pin the memory of the pixels; PyTorch's DataLoader calls this method."""
        self.pixels = [p.pin_memory() for p in self.pixels]
        if self.packed:
            self.packed.pixels = self.packed.pixels.pin_memory()
        return self


def size_groups(views: Views) -> list[tuple[int, int]]:
    """Return (count, size) for each group of neighbouring views of one size."""
    return [(len(list(group)), size) for size, group in itertools.groupby(views.size.tolist())]


def _empty(views: Views, rows: int, channels: int, step: int, *, boxes: bool, packed: bool) -> StepPart:
    groups = [] if packed else size_groups(views)
    return StepPart(
        pixels=[pixel_buffer(n, rows, channels, size, size) for n, size in groups],
        params=torch.empty(len(views.views), rows, len(sampling.COLUMNS)),
        index=torch.empty(rows, dtype=torch.long),
        label=torch.empty(rows, dtype=torch.long),
        boxes=torch.empty(len(views.views), rows, 4) if boxes else None,
        step=step,
    )


def mirrored(boxes: Tensor, params: Tensor) -> Tensor:
    """Return boxes (V, b, 4) with the x of both corners exchanged where the parameters (V, b, P) flip the view."""
    return torch.where(params[..., photometric.FLIP, None] > 0, boxes[..., [2, 1, 0, 3]], boxes)


def pixel_buffer(*shape: int) -> Tensor:
    """Allocate uint8 pixels; a loader process uses shared memory, so that nothing is copied to the main process."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    return shared_memory(math.prod(shape)).view(shape)  # PyTorch's own collation does the same


@dataclass(frozen=True)
class Stream:
    """The endless sequence of global batches.

    A global batch is divided into lanes, fixed slices of equal length. Each reader reads its own lanes, or its own rows
    of lanes that it shares."""

    index: Index
    views: Views
    seed: int
    lanes: int
    batch: int
    cache: Cache | None = None
    patience: float = PATIENCE  # seconds to retry a store that does not answer
    colours: bool = False  # whether the reader also applies the photometric operations, as no accelerator does
    selection: Selection | None = None  # how often each sample is read in an epoch; None: as the index says
    scaled: bool = False  # whether a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if its crops are reduced further
    phases: tuple[tuple[int, Views], ...] = ()  # (epoch, views): smaller views for the epochs before this one
    boxes: bool = False  # whether batches say where the crops lie
    packed: bool = False  # whether the device crops the decoded images

    def __post_init__(self) -> None:
        if self.scaled:
            check_scaled(self.index.channels)

    @property
    def steps_per_epoch(self) -> int:
        return self.samples_per_lane * self.lanes // self.batch

    @functools.cached_property
    def samples_per_lane(self) -> int:
        """Number of samples of a lane in an epoch. Raises UserError unless lanes divide the batch, and data fill it."""
        with explained(f"optim.batch={self.batch} data.lanes={self.lanes}", ValueError):
            return lane_length(self.samples_per_epoch, lanes=self.lanes, batch=self.batch)

    @functools.cached_property
    def samples_per_epoch(self) -> int:
        """The number of readings of samples in an epoch, with those at its end that fill no batch and are left out."""
        return self.selection.total if self.selection else int(self.visits.sizes.sum())

    @functools.cached_property
    def visits(self) -> Visits:
        """The visits of every epoch of a stream without a selection. With a selection, `epoch` draws its own visits.

        A visit is one reading of a block; a block with a repeat count has several visits."""
        shard = np.searchsorted(self.index.first, self.index.starts[:-1], "right") - 1
        blocks = np.repeat(np.arange(len(shard)), self.index.repeats[shard])
        return Visits(blocks, self.index.block_sizes[blocks])

    def views_at(self, step: int) -> Views:
        """Return the views of a step, which are smaller in an early phase of the training."""
        return next((views for end, views in self.phases if step < end * self.steps_per_epoch), self.views)

    def share(self, lanes: range | None = None) -> Share:
        """Return the Share of a reader that reads all rows of `lanes` and shares none with other readers. None: all."""
        each, own = self.batch // self.lanes, lanes or range(self.lanes)
        return Share(range(own.start * each, own.stop * each), each)

    def parts(
        self, share: range | Share, *, start: int, stop: int | None = None, ends: Ends | None = None
    ) -> Iterator[StepPart]:
        """Yield the rows of `share`, a range of lanes or a Share, as one StepPart for every step from `start` on,
        before `stop`.

        If a lane is in `ends`, its blocks come through that end, shared with other readers. An error is stored in the
        part in which it occurs, and that part is the last."""
        share = self.share(share) if isinstance(share, range) else share
        steps, channels = self._steps(share, start, stop, ends or {}), planes(self.index.channels)
        packer = Packer(self.views, channels) if self.packed else None
        for step in itertools.count(start) if stop is None else range(start, stop):
            views = self.views_at(step)
            rows = len(share.at(step))
            part = _empty(views, rows, channels, step, boxes=self.boxes, packed=self.packed)
            try:
                if packer:
                    packer.begin(views, rows)
                numbers = [self._fill(part, row, item, views, packer) for row, item in enumerate(next(steps))]
                if numbers:
                    u, more = (np.array(x) for x in zip(*numbers, strict=True))
                    params = sampling.photometrics(views, u, more)  # (b, V, P)
                    part.params = torch.from_numpy(params.swapaxes(0, 1).copy())
                if packer:
                    part.packed = packer.end(pixel_buffer)
                if part.boxes is not None:
                    part.boxes = mirrored(part.boxes, part.params)
                if self.colours:
                    for crops, rows_of_params in zip(itertools.chain(*part.pixels), part.params, strict=True):
                        photometric_cpu.apply_(crops, rows_of_params)
            except (UserError, Outage) as e:
                part.error = e
                _fail(ends, e)
            except Exception as e:
                _fail(ends, RuntimeError(f"another loader process failed: {e}"))
                raise
            yield part
            if part.error:
                return

    def samples(self, lanes: range, *, start: int, stop: int | None = None) -> Iterator[tuple[int, memoryview]]:
        """Yield the lanes' samples and their undecoded bytes, in reading order. Raises BadImage for changed bytes."""
        for items in self._steps(self.share(lanes), start, stop, {}):
            for item in items:
                sample = int(item.lane_run.order[item.at])
                yield sample, item.block.bytes(sample)

    def _steps(self, share: Share, start: int, stop: int | None, ends: Ends) -> Iterator[list["_NextSample"]]:
        """Yield the samples of every step. All blocks of a step are requested before any of them is waited for."""
        each, lanes = share.each, share.lanes
        selects = self.selection is not None
        epochs = functools.lru_cache(maxsize=2)(self.epoch)  # keeps two plans, which all lanes use
        open_fetcher = Fetcher(self.index, cache=self.cache, patience=self.patience, selects=selects)
        with contextlib.closing(open_fetcher) as fetcher:
            runs = {number: self._lane_runs(number, start, stop, epochs) for number in lanes}
            walks = [_LaneReader(fetcher, runs[number], each, ends.get(number)) for number in lanes]
            for step in itertools.count(start) if stop is None else range(start, stop):
                rows = share.at(step)
                first = rows.start - lanes.start * each
                items = [next(walk) for walk in walks for _ in range(each)]
                yield items[first : first + len(rows)]
                for walk in walks:
                    walk.look_ahead()

    def epoch(self, epoch: int) -> "EpochPlan":
        """Return the plan of an epoch: which visits it has, in which order, and which samples they read."""
        copies = self.selection.copies(seed=self.seed, epoch=epoch) if self.selection else None
        visits = self.visits if copies is None else visits_of(copies, self.index.starts)
        return EpochPlan(epoch, Epoch.of(visits.sizes, seed=self.seed, epoch=epoch), visits, copies, self.index.starts)

    def _lane_runs(
        self, number: int, start: int, stop: int | None, epochs: Callable[[int], "EpochPlan"]
    ) -> Iterator["_LaneRun"]:
        """Yield the runs, parts of one visit each, that the lane `number` reads from the step `start` on."""
        epoch, step = divmod(start, self.steps_per_epoch)
        each = self.batch // self.lanes
        skip, left = step * each, math.inf if stop is None else (stop - start) * each
        while True:
            this = epochs(epoch)
            lane = this.order.lane(number, lanes=self.lanes, batch=self.batch)
            before = np.cumsum(lane.lasts - lane.firsts)
            first = int(np.searchsorted(before, skip, "right"))
            skip -= int(before[first - 1]) if first else 0
            for i in range(first, len(lane)):
                if left <= 0:
                    return
                samples, positions = this.samples(lane[i]), lane[i].order(seed=self.seed, epoch=epoch) - lane[i].first
                yield _LaneRun(this, lane, i, samples, samples[positions], this.visits.number(lane[i].block), skip)
                left -= len(samples) - skip
                skip = 0
            epoch += 1

    def _fill(
        self, part: StepPart, row: int, item: "_NextSample", views: Views, packer: Packer | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Decode one sample and write its crops and its label into a row of the part. Where the device crops, the
        `packer` gets the image instead.

        Return the sample's random numbers: those of `uniforms` and those of `extra_uniforms`."""
        lane_run = item.lane_run
        # The key of the intended sample decides the crops, so a replacement has other crops than in its own place.
        key, epoch = int(lane_run.order[item.at]) + lane_run.copy * len(self.index), lane_run.epoch.number
        u = sampling.uniforms(len(views.views), seed=self.seed, epoch=epoch, sample=key)
        more = sampling.extra_uniforms(views, seed=self.seed, epoch=epoch, sample=key)
        sample, block, image, boxes = self._decode(part, item, views, u)
        part.index[row], part.label[row] = sample, block.label(sample)
        if part.boxes is not None:
            part.boxes[:, row] = torch.from_numpy(sampling.shares(boxes, *image.shape[1:]))
        if packer:
            packer.add(image, boxes)
            return u, more
        crops = [view[row] for group in part.pixels for view in group]
        crop(image, boxes, views.views, crops)
        for pixels, view, v in zip(crops, views.views, more, strict=True):
            if view.randaugment:
                augment(pixels, view, int(v[sampling.POLICY] * 2**32))
        if views.operations:
            seeds = sampling.operation_seeds(views, seed=self.seed, epoch=epoch, sample=key)
            for pixels, view, row_of_seeds in zip(crops, views.views, seeds.tolist(), strict=True):
                for name, operation_seed in zip(view.operations, row_of_seeds, strict=False):
                    operate(name, pixels, operation_seed)
        return u, more

    def _decode(
        self, part: StepPart, item: "_NextSample", views: Views, u: NDArray[np.float64]
    ) -> tuple[int, Block, Tensor, Boxes]:
        """Decode a sample; return it with its block, its image and the boxes of its crops. A broken or forgotten sample
        is replaced by the next good one of its block or, if there is none, of the lane's other blocks.

        Raises UserError when no sample of the lane can be decoded."""
        broken, forgotten = item.lane_run.broken, self.index.forgotten
        for sample, block in self._candidates(item):
            if sample in forgotten:
                continue
            if sample not in broken:
                try:
                    data, channels = block.bytes(sample), self.index.channels
                    return sample, block, *decode_boxes(data, views, u, scaled=self.scaled, channels=channels)
                except BadImage as e:
                    broken[sample] = self.index.bad_sample(sample, str(e))
            part.bad.append(broken[sample])
        why = [f"; {bad.shard}: {bad.key}: {bad.reason}" for bad in part.bad] or [", as all are forgotten"]
        raise UserError(f"no usable image is left in a whole lane of the data{why[-1]}")

    def _candidates(self, item: "_NextSample") -> Iterator[tuple[int, Block]]:
        lane_run = item.lane_run
        for i in range(len(lane_run.order)):
            yield int(lane_run.order[(item.at + i) % len(lane_run.order)]), item.block
        for i in range(1, len(lane_run.lane)):
            samples = lane_run.epoch.samples(lane_run.lane[(lane_run.at_run + i) % len(lane_run.lane)])
            block = item.block  # its bytes are not used if all samples are known to be broken or forgotten
            if any(s not in lane_run.broken and s not in self.index.forgotten for s in samples.tolist()):
                if i not in lane_run.stand_in:
                    lane_run.stand_in = {i: Block(item.block.fetcher, samples)}
                block = lane_run.stand_in[i]
            for sample in samples.tolist():
                yield sample, block


def _fail(ends: Ends | None, error: Exception) -> None:
    """Pass an error to the readers that wait for blocks of this reader."""
    for end in (ends or {}).values():
        end.fail(error)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The visits of an epoch, their order, and the samples that each visit reads of its block."""

    number: int
    order: Epoch
    visits: Visits
    copies: NDArray[np.uint16] | None  # (N,) how often each sample is read; None: as often as its block is visited
    starts: NDArray[np.int64]  # (B + 1,) first sample of each block, and N

    def samples(self, run: Run) -> NDArray[np.int64]:
        """Return the samples of a run, in their order in the shard. Here `run.block` is the index of a visit."""
        block = self.visits.blocks[run.block]
        first, last = int(self.starts[block]), int(self.starts[block + 1])
        if self.copies is None:
            return np.arange(first + run.first, first + run.last)
        mine = np.flatnonzero(self.copies[first:last] > self.visits.number(run.block))
        return first + mine[run.first : run.last]


@dataclass(slots=True)
class _LaneRun:
    """A run, the part of a visit that a lane reads, with the lane's position in the run."""

    epoch: EpochPlan
    lane: Lane
    at_run: int  # the position of this run in `lane`
    samples: NDArray[np.int64]  # sorted by their position in the shard
    order: NDArray[np.int64]  # the same samples in reading order
    copy: int  # how often these samples were read before in this epoch
    at: int  # the position of the next sample in `order`
    # These are kept, as a whole block may be broken, and replacements must not be searched anew for each sample.
    broken: dict[int, BadSample] = field(default_factory=dict)  # broken samples by their index
    stand_in: dict[int, Block] = field(default_factory=dict)  # block of the last replacement, by distance in the lane


@dataclass(frozen=True, slots=True)
class _NextSample:
    """The sample that a lane reads next, `lane_run.order[at]`."""

    lane_run: _LaneRun
    at: int
    block: Block


class _LaneReader:
    """Yields a lane's samples, and fetches the next block while the current one is read."""

    def __init__(
        self, fetcher: Fetcher, lane_runs: Iterator[_LaneRun], each: int, end: Leader | Follower | None = None
    ) -> None:
        """Request the blocks of the first step, which takes `each` samples of the lane."""
        self.fetcher, self.lane_runs, self.end = fetcher, lane_runs, end
        self.requested = 0
        self.open: deque[tuple[_LaneRun, Block]] = deque()
        while each > sum(len(lane_run.order) - lane_run.at for lane_run, _ in self.open) and self._request_block():
            pass

    def look_ahead(self) -> None:
        """Request blocks until the lane has two. Called between steps, when used blocks have been released."""
        while len(self.open) < 2 and self._request_block():
            pass

    def _request_block(self) -> bool:
        """Request the next block, and return whether there is one."""
        lane_run = next(self.lane_runs, None)
        if lane_run:
            through = functools.partial(self.end.get, self.requested) if self.end else None
            block = Block(self.fetcher, lane_run.samples, self.end.pool if self.end else None, through)
            self.open.append((lane_run, block))
            self.requested += 1
        return lane_run is not None

    def __next__(self) -> _NextSample:
        if not self.open:  # a step that takes more than two blocks
            self._request_block()
        lane_run, block = self.open[0]
        item = _NextSample(lane_run, lane_run.at, block)
        lane_run.at += 1
        if lane_run.at == len(lane_run.order):
            self.open.popleft()
        return item
