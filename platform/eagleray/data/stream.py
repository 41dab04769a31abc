"""From lanes to cropped samples: one reader fetches blocks, decodes, crops, and replaces what is broken."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagleray.data import store
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index
from eagleray.data.order import Run, lane, lane_length
from eagleray.data.quarantine import Bad
from eagleray.errors import UserError
from eagleray.views import draw
from eagleray.views.crop import corners, crop
from eagleray.views.draw import Views


@dataclass
class Part:
    """What one reader gives to one step: b images, V views in G groups of neighbours of one size."""

    pixels: list[Tensor]  # G x (views, b, 3, S, S) uint8
    params: Tensor  # (V, b, 13), see views.draw
    boxes: Tensor  # (V, b, 4)
    index: Tensor  # (b,)
    label: Tensor  # (b,)
    bad: list[Bad] = field(default_factory=list)
    error: str = ""  # why there is nothing to read any more

    def pin_memory(self) -> "Part":
        self.pixels = [p.pin_memory() for p in self.pixels]
        return self


def groups(views: Views) -> list[tuple[int, int]]:
    """(count, size) of neighbouring views of one size."""
    out: list[tuple[int, int]] = []
    for view in views.views:
        if out and out[-1][1] == view.size:
            out[-1] = (out[-1][0] + 1, view.size)
        else:
            out.append((1, view.size))
    return out


@dataclass(frozen=True)
class Stream:
    """The endless sequence of global batches, of which a reader gives the lanes that it owns."""

    index: Index
    views: Views
    seed: int
    lanes: int
    batch: int

    @property
    def steps_per_epoch(self) -> int:
        return self.share * self.lanes // self.batch

    @property
    def share(self) -> int:
        """Samples of one lane in an epoch. Raises UserError when the lanes or the data do not fit the batch."""
        try:
            return lane_length(len(self.index), lanes=self.lanes, batch=self.batch)
        except ValueError as e:
            raise UserError(f"optim.batch={self.batch} data.lanes={self.lanes}: {e}") from None

    def parts(self, lanes: range, *, start: int) -> Iterator[Part]:
        """The lanes' part of every step from `start` on. Ends with a part that carries an error."""
        each = self.batch // self.lanes
        with ThreadPoolExecutor(min(len(lanes), 8)) as pool:
            walks = [self._walk(pool, number, start) for number in lanes]
            while True:
                part = self._empty(len(lanes) * each)
                try:
                    # All lanes are asked first, so that their blocks are fetched side by side.
                    for row, place in enumerate([next(walks[row // each]) for row in range(len(lanes) * each)]):
                        self._fill(part, row, place)
                except UserError as e:
                    part.error = str(e)
                yield part
                if part.error:
                    return

    def _empty(self, rows: int) -> Part:
        v = len(self.views.views)
        return Part(
            pixels=[torch.empty(n, rows, 3, size, size, dtype=torch.uint8) for n, size in groups(self.views)],
            params=torch.empty(v, rows, len(draw.COLUMNS)),
            boxes=torch.empty(v, rows, 4),
            index=torch.empty(rows, dtype=torch.long),
            label=torch.empty(rows, dtype=torch.long),
        )

    def _walk(self, pool: ThreadPoolExecutor, number: int, start: int) -> Iterator["_Place"]:
        """A lane's samples from a step on, its next block fetched while this one is read."""
        epoch, step = divmod(start, self.steps_per_epoch)
        skip = step * (self.batch // self.lanes)
        while True:
            runs = lane(
                self.index.block_sizes, seed=self.seed, epoch=epoch, lanes=self.lanes, batch=self.batch, number=number
            )
            sizes = np.array([r.last - r.first for r in runs])
            first = int(np.searchsorted(np.cumsum(sizes), skip, "right"))
            skip -= int(sizes[:first].sum())
            ahead = pool.submit(self._fetch, runs[first])
            for i in range(first, len(runs)):
                here, ahead = ahead, pool.submit(self._fetch, runs[i + 1]) if i + 1 < len(runs) else ahead
                order = runs[i].order(seed=self.seed, epoch=epoch) + self.index.starts[runs[i].block]
                for at in range(skip, len(order)):
                    yield _Place(epoch, order, at, here, runs, i)
                skip = 0
            epoch += 1

    def _fetch(self, run: Run) -> "_Bytes":
        """One ranged read: from the first byte of a run's first image to the last of its last."""
        first, last = self.index.starts[run.block] + run.first, self.index.starts[run.block] + run.last - 1
        begin, end = int(self.index.offset[first]), int(self.index.offset[last] + self.index.size[last])
        url = self.index.shards[self.index.shard[first]].url
        return _Bytes(begin, memoryview(store.store(url).read(url, begin, end - begin)))

    def _fill(self, part: Part, row: int, place: "_Place") -> None:
        """Decode and crop one sample into its row."""
        sample, image = self._decode(part, place)
        key = int(place.order[place.at])  # not `sample`: a stand-in shall not look as it does in its own place
        u = draw.uniforms(len(self.views.views), seed=self.seed, epoch=place.epoch, sample=key)
        height, width = image.shape[1:]
        boxes, params = draw.crops(self.views, u, height, width), draw.photometrics(self.views, u)
        crop(image, boxes, self.views.views, [view[row] for group in part.pixels for view in group])
        part.params[:, row] = torch.from_numpy(params)
        part.boxes[:, row] = torch.from_numpy(corners(boxes, params[:, 0], height, width))
        part.index[row], part.label[row] = sample, int(self.index.label[sample])

    def _decode(self, part: Part, place: "_Place") -> tuple[int, Tensor]:
        """The sample, or the next good one of its block, or of the lane's other blocks."""
        for sample, block in self._candidates(place):
            begin = int(self.index.offset[sample]) - block.begin
            try:
                return sample, decode(block.data[begin : begin + int(self.index.size[sample])])
            except BadImage as e:
                part.bad.append(self.index.named(sample, str(e)))
        last = part.bad[-1]
        raise UserError(f"no usable image is left in a whole lane of the data; {last.shard}: {last.key}: {last.reason}")

    def _candidates(self, place: "_Place") -> Iterator[tuple[int, "_Bytes"]]:
        block = place.block.result()
        for i in range(len(place.order)):
            yield int(place.order[(place.at + i) % len(place.order)]), block
        for run in place.runs[place.run + 1 :] + place.runs[: place.run]:
            block = self._fetch(run)
            for sample in range(run.first, run.last):
                yield int(self.index.starts[run.block]) + sample, block


@dataclass(frozen=True, slots=True)
class _Bytes:
    begin: int  # where in the shard
    data: memoryview


@dataclass(frozen=True, slots=True)
class _Place:
    """One turn of a lane: the sample `order[at]`, and where stand-ins for it would come from."""

    epoch: int
    order: NDArray[np.int64]  # samples of the block, in reading order
    at: int
    block: "Future[_Bytes]"
    runs: list[Run]  # of the lane in this epoch
    run: int  # the one being read
