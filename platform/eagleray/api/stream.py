"""Iterate over the training stream, for a training loop of one's own."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass

from eagleray import config
from eagleray.base import dist, files
from eagleray.base.errors import UserError, explained
from eagleray.base.numbers_given import whole
from eagleray.config import STRICT
from eagleray.config import plugins as loading
from eagleray.config.channels import Channel, Channels, check_operations
from eagleray.config.source import Sources
from eagleray.config.view import View, check_views
from eagleray.data import loader as stream_loader
from eagleray.data.batch import Batch
from eagleray.data.columns import select
from eagleray.data.index import open_index
from eagleray.data.quarantine import BadSample, Quarantine, broken
from eagleray.data.reader import Stream
from eagleray.storage.block_cache import Cache
from eagleray.views.sampling import Views

LANES = 64  # default number of lanes, as in recipes; fewer if the batch is no multiple of it
WORKERS = 4  # largest number of loader processes by default


@dataclass(frozen=True, config=STRICT)
class _Given:
    """The arguments of Loader that describe the data, checked like those of a recipe."""

    data: Sources
    decode: Literal["full", "scaled"]
    channels: Channels = ()


class Loader:
    """An exact, resumable stream of batches for your own training loop. Each rank receives its share of every batch.

    `data` names shards or a folder of images. `data` may also select samples, like `data.train` of a recipe: `{"url":
    "shards/", "where": "label < 10"}`. `views` describes the crops of every image, like `views` in a recipe. `batch` is
    the global batch size over all ranks of torchrun or torch.distributed. The batches depend only on the data, `views`,
    `batch`, `seed` and `lanes`, not on the number of ranks or loader processes. `workers` is the number of loader
    processes of each rank; 0 loads in this process. `start` is the step of the first batch, counted over all epochs.

    Each `for` loop yields the batches up to the end of an epoch, and the next loop continues with the next epoch. A
    batch has `views`, normalised tensors of (B, 3, H, W) on `device`; `label` (B,), which is -1 without a label; and
    `index` (B,), the positions of the images in the data. `len(loader)` is the number of steps in an epoch.
    `state_dict()` and `load_state_dict()` save and restore the position in the stream. With `decode="scaled"`, the
    loader decodes a large JPEG at a half, a quarter or an eighth of its size if every crop is scaled down at least that
    much. If images are not RGB, `channels` lists the mean and the standard deviation of each channel, like
    `data.channels` in a recipe. The loader lists broken images in `bad` and replaces them. If the share of broken
    images exceeds `bad_limit`, the loader raises UserError. `cache` is a folder on a local disk that keeps fetched
    data, up to `cache_size` bytes. `plugins` lists Python files and modules that register view operations.

    Raises UserError for wrong settings or data, and Outage if a store does not answer.

    Example:

        loader = eagleray.loader("shards/", views=[{"size": 32, "count": 2}], batch=16, start=3, workers=0)
        for batch in loader:
            first, second = batch.views
            assert first.shape == (16, 3, 32, 32) and batch.label.shape == (16,)
        checkpoint = {"data": loader.state_dict()}
    """

    def __init__(
        self,
        data: str | Path | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        *,
        views: Sequence[View | Mapping[str, Any]],
        batch: int,
        seed: int = 0,
        start: int = 0,
        workers: int | None = None,
        lanes: int | None = None,
        device: str | torch.device = "cpu",
        decode: Literal["full", "scaled"] = "full",
        channels: Sequence[Channel | Mapping[str, float]] = (),
        bad_limit: float = 0.01,
        cache: str | Path | None = None,
        cache_size: int = 100 * 2**30,
        plugins: Sequence[str | Path] = (),
    ) -> None:
        loading.load_installed()
        loading.resolve([str(name) for name in plugins])
        described = [v if isinstance(v, View) else config.check(View, v, f"views.{i}") for i, v in enumerate(views)]
        if not described:
            raise UserError("views: expected at least one, such as {'size': 224}")
        with explained("views", ValueError):
            check_views(tuple(described))
        batch, start, seed = whole("batch", batch, 1), whole("start", start, 0), whole("seed", seed, 0)
        lanes, workers = lanes and whole("lanes", lanes, 1), workers and whole("workers", workers, 0)
        rank, ranks = rank_of()
        lanes = lanes or next(n for n in range(min(LANES, batch), 0, -1) if batch % n == 0)
        workers = min(WORKERS, max(batch // ranks, 1)) if workers is None else workers
        plain = [vars(c) if isinstance(c, Channel) else c for c in channels]
        named = {"data": str(data) if isinstance(data, Path) else data, "decode": decode, "channels": plain}
        given = config.check(_Given, named, "")
        check_operations(described, given.channels)
        index = open_index(given.data, files.cache_folder("index"), note=lambda _: None, channels=given.channels)
        disk = Cache(Path(cache), cache_size) if cache else None
        chosen, scaled = Views.of(described), given.decode == "scaled"
        self._stream = Stream(index, chosen, seed, lanes, batch, disk, selection=select(index), scaled=scaled)
        self._loader = stream_loader.Loader(
            self._stream, rank=rank, ranks=ranks, workers=workers, device=torch.device(device)
        )
        self.step = start
        self.samples = len(index)
        self.steps_per_epoch = self._stream.steps_per_epoch
        self._quarantine = Quarantine(None, samples=len(index) + broken(index.bad), limit=bad_limit)
        self._quarantine.add(index.bad)

    @property
    def epoch(self) -> int:
        """Return the epoch of the next batch, counted from 0."""
        return self.step // self.steps_per_epoch

    @property
    def bad(self) -> list[BadSample]:
        """Return the broken images that were found so far, each with its shard, key, offset and reason."""
        return list(self._quarantine.bad.values())

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches up to the end of the epoch; `step` already counts the batch that is yielded. Raises
        UserError when more than `bad_limit` of the images are broken, and Outage when a store does not answer."""
        stop = (self.epoch + 1) * self.steps_per_epoch
        for batch, bad in self._loader.batches(self.step, stop):
            self._quarantine.add(bad)
            self.step += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position in the stream, to store it in a checkpoint."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position in `state`. The next batches do not depend on the number of ranks or workers."""
        self.step = state["step"]


loader = Loader  # an alias, as users call it like a function


def rank_of() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, from torch.distributed or else from torchrun's environment
    variables."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return dist.rank(), dist.size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
