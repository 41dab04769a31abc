"""Says in which steps a sample is read: the order of a stream, computed the other way round."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow.compute as pc

from eagleray.data.index import Index
from eagleray.data.order import Run
from eagleray.data.reader import EpochPlan, Stream


def samples_with(index: Index, key: str) -> Iterator[int]:
    """Yield the samples that have this key: one of each shard at most, if keys are unique there."""
    for shard in range(len(index.shards)):
        found = pc.indices_nonzero(pc.equal(index.column(shard, ["key"])["key"], key))
        yield from (int(index.first[shard]) + row for row in found.to_pylist())


def steps_with(stream: Stream, samples: Sequence[int], stop: int) -> list[list[int]]:
    """Return for each sample the steps before `stop`, counted from 0, whose batch the order gives it to.

    A batch may have another image in its place, if it is broken, or have it in place of a broken one."""
    steps: list[list[int]] = [[] for _ in samples]
    for number in range(-(-stop // stream.steps_per_epoch)):
        epoch = stream.epoch(number)  # an epoch of millions of samples takes seconds, so it is made once for all
        for sample, mine in zip(samples, steps, strict=True):
            mine += sorted(step for step in _steps_in(stream, epoch, sample) if step < stop)
    return steps


def _steps_in(stream: Stream, epoch: EpochPlan, sample: int) -> Iterator[int]:
    """Yield the steps of an epoch that read a sample, in the order of its block's visits."""
    length, each = stream.samples_per_lane, stream.batch // stream.lanes
    block = int(np.searchsorted(stream.index.starts, sample, "right")) - 1
    for visit in range(*np.searchsorted(epoch.visits.blocks, [block, block + 1]).tolist()):
        size = int(epoch.visits.sizes[visit])
        at = np.flatnonzero(epoch.samples(Run(visit, 0, size)) == sample)
        place = int(np.flatnonzero(epoch.order.blocks == visit)[0])
        begin = int(epoch.order.ends[place]) - size
        if len(at) and (lane := (begin + int(at[0])) // length) < stream.lanes:
            first, last = max(lane * length - begin, 0), min((lane + 1) * length - begin, size)
            order = Run(visit, first, last).order(seed=stream.seed, epoch=epoch.number)
            position = begin + first - lane * length + int(np.flatnonzero(order == at[0])[0])
            yield epoch.number * stream.steps_per_epoch + position // each
