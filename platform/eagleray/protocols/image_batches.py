"""Read the centre crops of images in the order of the given samples, in threads or in loader processes.

Images that are neighbours in a file are fetched with one ranged read, as in training, and checksums are verified."""

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from eagleray.base import cpu_share, devices
from eagleray.base.errors import Outage, UserError
from eagleray.config.channels import planes
from eagleray.data.blocks import Block, Fetcher
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index
from eagleray.data.loader_processes import loaded, processes
from eagleray.data.reader import pixel_buffer
from eagleray.storage.block_cache import Cache
from eagleray.storage.retry import PATIENCE
from eagleray.views.crop import centre_crop

BATCH = 256  # images in a forward pass; batches are never divided, so that they are the same on any number of ranks
AHEAD = 4  # number of batches that are read and decoded ahead of the one in use
PIECE = 32  # number of consecutive images that a thread decodes at a time
GAP = 2**20  # largest gap in bytes between two images that are fetched with one read

Crops = tuple[Tensor, Tensor]  # indices of the samples (b,), and their centre crops (b, 3, S, S), uint8


@dataclass(frozen=True)
class Reading:
    """The way in which images are read: by threads or by loader processes, and with or without a cache of blocks."""

    workers: int = 0  # number of loader processes; 0: threads of this process read
    cache: Cache | None = None
    patience: float = PATIENCE  # seconds for which a request is retried while the store does not answer

    @classmethod
    def beside(cls, device: torch.device) -> "Reading":
        """Return how to read images while a backbone computes on a device.

        With an accelerator, loader processes read: threads would delay the thread that launches its kernels. On a CPU,
        threads read: processes would only take CPU time from the backbone."""
        return cls(processes("auto", cpu_share.cpus())) if devices.is_accelerator(device) else THREADS


THREADS = Reading()


def batches(
    index: Index,
    samples: NDArray[np.int64],
    size: int,
    resize: int,
    batch: int = BATCH,
    *,
    reading: Reading = THREADS,
    device: torch.device = devices.CPU,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield, for each batch, the indices of the samples that decode, and their centre crops (b, 3, size, size), uint8.

    While the caller uses a batch on the device, the next batches are read. Batches in which no image decodes are left
    out. Raises UserError or Outage when the images cannot be read."""
    chunks = [samples[i : i + batch] for i in range(0, len(samples), batch)]
    crops = _CentreCrops(index, chunks, size, resize, reading)
    workers = min(reading.workers, len(chunks))
    pinned = workers > 0 and devices.has_streams(device)
    own = torch.Generator()  # training uses PyTorch's global generator
    with loaded(crops, workers, pin_memory=pinned, generator=own) as (items, _):
        for item in items:
            if isinstance(item, Exception):
                raise item
            rows, images = item
            if len(rows):
                yield rows.tolist(), images


@dataclass(frozen=True)
class _CentreCrops(IterableDataset[Crops | UserError | Outage]):
    """Yields the centre crops of chunks of samples, in order. A loader process only yields its share of the chunks.

    An error is yielded, not raised, because PyTorch would wrap a raised one in a traceback of the loader process."""

    index: Index
    chunks: list[NDArray[np.int64]]
    size: int
    resize: int
    reading: Reading

    def __iter__(self) -> Iterator[Crops | UserError | Outage]:
        info = get_worker_info()
        chunks = self.chunks[info.id :: info.num_workers] if info else self.chunks
        threads = 1 if info else max(int(cpu_share.cpus()), 1)
        queue: deque[_Batch] = deque()
        fetcher = Fetcher(self.index, cache=self.reading.cache, patience=self.reading.patience)
        try:
            with contextlib.closing(fetcher), ThreadPoolExecutor(threads) as pool:
                for chunk in chunks:
                    queue.append(self._begin(pool, fetcher, chunk))
                    if len(queue) > (1 if info else AHEAD):
                        yield queue.popleft().result()
                while queue:
                    yield queue.popleft().result()
        except (UserError, Outage) as e:
            yield e

    def _begin(self, pool: ThreadPoolExecutor, fetcher: Fetcher, chunk: NDArray[np.int64]) -> "_Batch":
        """Request the bytes of a batch and return the batch. Threads of the `pool` decode its images later."""
        with torch.inference_mode(False):  # else the pool's threads, not in inference mode, could not write to it
            batch = _Batch(chunk, pixel_buffer(len(chunk), planes(self.index.channels), self.size, self.size), [])
        row = 0
        for block, samples in self._blocks(fetcher, chunk):
            for i in range(0, len(samples), PIECE):
                out = batch.images[row : row + len(samples[i : i + PIECE])]
                batch.good.append(pool.submit(self._decode, block, samples[i : i + PIECE], out))
                row += len(out)
        return batch

    def _blocks(self, fetcher: Fetcher, chunk: NDArray[np.int64]) -> list[tuple[Block, NDArray[np.int64]]]:
        """Request the bytes of the samples `chunk` (b,), which ascend. Return blocks, each with the samples (n,) in it.

        Samples in different blocks of the index, or more than GAP bytes apart, are requested separately."""
        starts, out = self.index.starts, []
        number = np.searchsorted(starts, chunk, "right") - 1  # index of each sample's block
        for samples in np.split(chunk, np.flatnonzero(np.diff(number)) + 1):
            rows, at = self.index.rows(int(samples[0]), int(samples[-1]) + 1), samples - samples[0]
            gaps = rows.offset[at[1:]] - rows.offset[at[:-1]] - rows.size[at[:-1]]
            for part in np.split(samples, np.flatnonzero(gaps > GAP) + 1):
                out.append((Block(fetcher, np.arange(part[0], part[-1] + 1)), part))
        return out

    def _decode(self, block: Block, samples: NDArray[np.int64], out: Tensor) -> list[bool]:
        """Write the centre crops of n samples into `out` (n, 3, S, S), and return whether each sample decodes."""
        good = []
        for sample, pixels in zip(samples.tolist(), out, strict=True):
            try:
                image = decode(block.bytes(sample), self.index.channels)
                pixels.copy_(centre_crop(image, resize=self.resize, size=self.size))
            except BadImage:
                good.append(False)
            else:
                good.append(True)
        return good


class _Batch(NamedTuple):
    """A batch that is being read: its samples (b,), their crops (b, 3, S, S), and whether each of them decodes."""

    samples: NDArray[np.int64]
    images: Tensor
    good: list[Future[list[bool]]]  # for each piece of PIECE images: whether each image decodes

    def result(self) -> Crops:
        good = torch.tensor([ok for piece in self.good for ok in piece.result()], dtype=torch.bool)
        numbers = torch.tensor(self.samples)
        return (numbers, self.images) if good.all() else (numbers[good], self.images[good])
