"""Computes in which steps a sample is used, by inverting the order in which a stream reads."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from eagleray.data.file_names import to_text
from eagleray.data.image_folder import address
from eagleray.data.index import Index
from eagleray.data.order import Run
from eagleray.data.quarantine import BadSample
from eagleray.data.reader import EpochPlan, Stream


def with_keys(index: Index, samples: Iterable[int]) -> Iterator[tuple[int, int, str]]:
    """Yield the samples in rising order, each with the index of its shard and its key. Each shard is read once."""
    rising = np.array(sorted(samples), np.int64)
    shards = np.searchsorted(index.first, rising, "right") - 1
    for shard in np.unique(shards).tolist():
        mine = rising[shards == shard]
        keys = index.column(shard, ["key"])["key"].take(pa.array(mine - int(index.first[shard]))).to_pylist()
        yield from zip(mine.tolist(), itertools.repeat(shard), keys)


def samples_with(index: Index, key: str) -> Iterator[int]:
    """Yield the samples that have this key: at most one of each shard, if its keys are unique."""
    key = to_text(key) if any("\udc80" <= c <= "\udcff" for c in key) else key  # a file name that is not UTF-8
    for shard in range(len(index.shards)):
        found = pc.indices_nonzero(pc.equal(index.column(shard, ["key"])["key"], key))
        yield from (int(index.first[shard]) + row for row in found.to_pylist())


def broken_samples(index: Index, bad: Iterable[BadSample]) -> Iterator[int]:
    """Yield the samples that a quarantine names. Shards are found by file name, as they may have been moved since."""
    places = defaultdict[str, set[tuple[int, str]]](set)
    for sample in bad:
        places[sample.shard.rpartition("/")[2]].add((sample.offset, sample.key))
    for number, blob in enumerate(index.shards):
        if known := places.get(address(blob).rpartition("/")[2]):
            offset = index.column(number, ["offset"])["offset"].to_numpy()
            for row in np.flatnonzero(np.isin(offset, [place for place, _ in known])).tolist():
                if (int(offset[row]), index.key(at := int(index.first[number]) + row)) in known:
                    yield at


def steps_with(stream: Stream, samples: Sequence[int], stop: int, bad: Collection[int] = ()) -> list[list[int]]:
    """Return for each of `samples` the steps before `stop`, counted from 0, with the sample in their batches.

    `bad` are samples that are broken or forgotten: another sample replaces each of them in every batch."""
    steps: dict[int, list[int]] = {sample: [] for sample in samples}
    for at, used in _uses(stream, samples, stop, bad):
        for step, sample in zip(at.tolist(), used.tolist(), strict=True):
            if sample in steps:
                steps[sample].append(step)
    return [sorted(steps[sample]) for sample in samples]


def first_step_with(stream: Stream, samples: Collection[int], stop: int, bad: Collection[int] = ()) -> int | None:
    """Return the first step before `stop`, counted from 0, with any of these samples in its batch, or None. `bad` is as
    in `steps_with`."""
    wanted, first = _mask(stream, samples), stop
    for at, used in _uses(stream, samples, stop, bad):
        if at[0] - at[0] % stream.steps_per_epoch > first:
            break  # this epoch and all later ones begin after the step `first`
        first = min(first, int(at[wanted[used]].min(initial=stop)))
    return first if first < stop else None


def _uses(
    stream: Stream, samples: Collection[int], stop: int, bad: Collection[int]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield, epoch by epoch, arrays of steps before `stop`, and of the sample that each of these steps uses: for all
    blocks with some of the `samples` or `bad` samples."""
    looked, gone = np.array(sorted({*samples, *bad}), np.int64), _mask(stream, bad)
    blocks = np.unique(np.searchsorted(stream.index.starts, looked, "right") - 1)
    for number in range(-(-stop // stream.steps_per_epoch)):
        epoch = stream.epoch(number)  # made once for all blocks, as millions of samples take seconds
        for at, used in _uses_in(stream, epoch, blocks, gone):
            if (here := at < stop).any():
                yield at[here], used[here]


def _uses_in(
    stream: Stream, epoch: EpochPlan, blocks: NDArray[np.int64], gone: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield arrays of steps of an epoch and of the sample that each uses, a pair for each run: the part of a visit of
    one of `blocks` that a lane reads. `gone` (N,) is a mask of the bad samples."""
    length, each = stream.samples_per_lane, stream.batch // stream.lanes
    for place in np.flatnonzero(np.isin(epoch.visits.blocks[epoch.order.blocks], blocks)).tolist():
        end, visit = int(epoch.order.ends[place]), int(epoch.order.blocks[place])
        begin = end - int(epoch.order.sizes[place])
        for lane in range(begin // length, min(-(-end // length), stream.lanes)):
            run = Run(visit, max(lane * length - begin, 0), min((lane + 1) * length, end) - begin)
            order = epoch.samples(run)[run.order(seed=stream.seed, epoch=epoch.number) - run.first]
            position = begin + run.first - lane * length + np.arange(len(order))
            used = order.copy()
            for i in np.flatnonzero(gone[order]).tolist():
                behind = np.roll(order, -i)
                good = behind[~gone[behind]]
                used[i] = good[0] if len(good) else _of_another_block(stream, epoch, lane, run, gone)
            yield epoch.number * stream.steps_per_epoch + position // each, used


def _of_another_block(stream: Stream, epoch: EpochPlan, number: int, run: Run, gone: NDArray[np.bool_]) -> int:
    """Return the replacement for a run whose samples are all bad: the first good sample of the lane's next runs."""
    lane = epoch.order.lane(number, lanes=stream.lanes, batch=stream.batch)
    at = int(np.flatnonzero(lane.blocks == run.block)[0])
    others = (epoch.samples(lane[(at + i) % len(lane)]) for i in range(1, len(lane)))
    return next(int(samples[~gone[samples]][0]) for samples in others if not gone[samples].all())


def _mask(stream: Stream, samples: Collection[int]) -> NDArray[np.bool_]:
    """Return a mask (N,) of these samples among all samples of the stream's index."""
    mask = np.zeros(len(stream.index), bool)
    mask[list(samples)] = True
    return mask
