"""A plug-in as its author would write it: a method, a backbone, a view operation, a source, a protocol, a callback."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer, build_model_with_cfg, register_model
from torch import Tensor, nn

from eagleray import Backbone, Batch, Callback, Encoder, FeatureProtocol, Method, Outcome, Progress, RunView, register
from eagleray.datasets.sources.files import list_tree, relative_path
from eagleray.datasets.sources.item import Item, Listing
from eagleray.datasets.sources.source import Data, PrepareOptions, SourceFiles, read_ranges


@register.method("cosine_pairs")
class CosinePairs(Method):
    """Two views of an image agree, and a queue of nothing keeps them apart: the smallest method there is."""

    views = (2, 2)

    def __init__(self, backbone: Backbone, *, dim: int = 8, spread: float = 1.0) -> None:
        super().__init__()
        self.encoder = Encoder(backbone, nn.Linear(backbone.dim, dim))
        self.spread = spread

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        z1, z2 = F.normalize(self.encoder(batch.views), dim=1).chunk(2)
        return {"loss": -(z1 * z2).sum(1).mean() + self.spread * z1.mean(0).square().sum()}

    def export(self) -> Backbone:
        return self.encoder.backbone


@register_model
def vit_of_a_plugin(pretrained: bool = False, **options: Any) -> nn.Module:
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    return build_model_with_cfg(VisionTransformer, "vit_of_a_plugin", pretrained, **small | options)


@register.view("stripes")
def stripes(crop: Tensor, seed: int) -> Tensor:
    """Every other row of a random colour."""
    g = torch.Generator().manual_seed(seed)
    out = crop.clone()
    out[:, ::2] = torch.randint(256, (3, 1, 1), generator=g, dtype=torch.uint8)
    return out


@register.source("drawers", licence="CC0 1.0")
def drawers(options: PrepareOptions) -> SourceFiles:
    """Images whose class is the first letter of their name, and whose bytes are stored backwards."""
    blobs = list_tree(options.origin)
    classes = sorted({relative_path(b, options.origin)[0] for b in blobs})

    def listing() -> Listing:
        names = [relative_path(b, options.origin) for b in blobs]
        items = (
            Item(n.partition(".")[0], b.url, 0, b.size, "jpg", classes.index(n[0]))
            for n, b in zip(names, blobs, strict=True)
        )
        return Listing(items, classes)

    return SourceFiles(blobs, listing, read_backwards)


def read_backwards(items: Sequence[Item]) -> Iterator[tuple[Item, Data]]:
    return ((item, bytes(data)[::-1]) for item, data in read_ranges(items))


@register.protocol("norms")
class Norms(FeatureProtocol):
    about = "mean norm of the pooled features"
    scale: float = 1.0

    def run(self, backbone: Any, data: Any, workspace: Any) -> Outcome:
        return Outcome({"norms/mean": self.scale * float(data.test.x.norm(dim=1).mean())})


@register.callback
class Diary(Callback):
    """Writes what it is told into the run's folder."""

    def _write(self, run: RunView, **line: Any) -> None:
        if run.rank == 0:
            with (Path(run.out) / "diary.jsonl").open("a") as f:
                f.write(json.dumps(line) + "\n")

    def start(self, run: RunView, step: int) -> None:
        self._write(run, event="start", step=step)

    def step(self, run: RunView, step: Any) -> None:
        self._write(run, event="step", step=step.at.step + 1)

    def log(self, run: RunView, record: Any) -> None:
        self._write(run, event="log", step=record["step"])

    def evaluation(self, run: RunView, scores: Any) -> None:
        self._write(run, event="evaluation", scores=sorted(scores))

    def checkpoint(self, run: RunView, step: int) -> None:
        self._write(run, event="checkpoint", step=step)

    def end(self, run: RunView, summary: Any) -> None:
        self._write(run, event="end", steps=summary["steps"])
