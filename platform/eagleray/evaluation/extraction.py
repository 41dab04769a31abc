"""Get the frozen features of a backbone from the cache, or extract them in this process or in Ray tasks."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.base.progress import progress_bar
from eagleray.cluster.ray_map import ray_map
from eagleray.data.index import Index, open_index
from eagleray.engine import world
from eagleray.evaluation import feature_cache
from eagleray.evaluation.target import Target, load_target
from eagleray.protocols.digests import data_digest
from eagleray.protocols.features import LabelledFeatures, extract_features


@dataclass(frozen=True)
class Task:
    """The images that one worker extracts. It reads the backbone by itself, which may be too large to send."""

    given: str
    architecture: str | None
    url: str
    samples: NDArray[np.int64]
    size: int
    resize: int
    kinds: Sequence[str] = ()
    number: int = 0
    digest: str = ""  # of the backbone

    def shares(self, wanted: Sequence[str], workers: int) -> Iterator["Task"]:
        for number, samples in enumerate(np.array_split(self.samples, workers)):
            yield replace(self, samples=samples, kinds=tuple(wanted), number=number)


Share = tuple[int, dict[str, LabelledFeatures]]


def features(
    one: Target, index: Index, task: Task, wanted: Sequence[str], *, workers: int, note: Callable[[str], None]
) -> dict[str, LabelledFeatures]:
    """Return several types of features of the task's images, from the cache or extracted by this process or by so many
    workers. Raises UserError and Outage."""
    device = world.local().device
    precision = "bfloat16" if device.type == "cuda" and not workers else "float32"
    task = replace(task, digest=one.digest)

    def make(missing: Sequence[str]) -> dict[str, LabelledFeatures]:
        note(f"{len(task.samples)} images through {one.given}: {', '.join(missing)} features")
        with progress_bar("images") as progress:
            tick = functools.partial(progress.advance, progress.add_task("features", total=len(task.samples), rate=""))
            if workers:
                return joined(counted(ray_map(share, task.shares(missing, workers), workers=workers), tick))
            return extract_features(
                one.backbone.to(device),
                index,
                task.samples,
                size=task.size,
                resize=task.resize,
                kinds=missing,
                tick=tick,
            )

    data = data_digest(index, task.samples)
    return feature_cache.cached(one.digest, data, wanted, how=(task.size, task.resize, precision), make=make, note=note)


def share(task: Task) -> Share:
    """Extract one share of the images, in a Ray task."""
    one = load_target(task.given, task.architecture)
    if one.digest != task.digest:
        raise UserError(
            f"{task.given}: its weights changed during the evaluation; name a checkpoint file, or try again"
        )
    index = open_index(task.url, note=lambda _: None)
    found = extract_features(one.backbone, index, task.samples, size=task.size, resize=task.resize, kinds=task.kinds)
    return task.number, found


def counted(shares: Iterable[Share], tick: Callable[[int], None]) -> Iterator[Share]:
    for number, part in shares:
        yield number, part
        tick(len(next(iter(part.values())).y))


def joined(shares: Iterable[Share]) -> dict[str, LabelledFeatures]:
    """Join the shares in the order of their samples, whatever order they finished in."""
    parts = [part for _, part in sorted(shares, key=lambda share: share[0])]
    there = [p for p in parts if len(next(iter(p.values())).y)] or parts[:1]
    return {k: LabelledFeatures(*map(torch.cat, zip(*(p[k] for p in there), strict=True))) for k in there[0]}
