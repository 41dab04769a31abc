"""Says in which steps a sample is read: the order of a stream, computed the other way round."""

from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc

from eagleray.data.index import Index
from eagleray.data.order import Run
from eagleray.data.reader import Stream


def samples_with(index: Index, key: str) -> Iterator[int]:
    """Yield the samples that have this key: one of each shard at most, if keys are unique there."""
    for shard in range(len(index.shards)):
        found = pc.indices_nonzero(pc.equal(index.column(shard, ["key"])["key"], key))
        yield from (int(index.first[shard]) + row for row in found.to_pylist())


def steps_with(stream: Stream, sample: int, stop: int) -> Iterator[int]:
    """Yield the steps before `stop`, counted from 0, whose batch the order gives the sample to.

    A batch may have another image in its place, if it is broken, or have it in place of a broken one."""
    length, each = stream.samples_per_lane, stream.batch // stream.lanes
    block = int(np.searchsorted(stream.index.starts, sample, "right")) - 1
    for epoch in range(-(-stop // stream.steps_per_epoch)):
        this = stream.epoch(epoch)
        steps = []
        for visit in range(*np.searchsorted(this.visits.blocks, [block, block + 1]).tolist()):
            size = int(this.visits.sizes[visit])
            at = np.flatnonzero(this.samples(Run(visit, 0, size)) == sample)
            place = int(np.flatnonzero(this.order.blocks == visit)[0])
            begin = int(this.order.ends[place]) - size
            if len(at) and (lane := (begin + int(at[0])) // length) < stream.lanes:
                first, last = max(lane * length - begin, 0), min((lane + 1) * length - begin, size)
                order = Run(visit, first, last).order(seed=stream.seed, epoch=epoch)
                position = begin + first - lane * length + int(np.flatnonzero(order == at[0])[0])
                steps.append(epoch * stream.steps_per_epoch + position // each)
        yield from sorted(step for step in steps if step < stop)
