"""Fine-tune a backbone for semantic segmentation, with a head that predicts the class of every pixel.

Semantic FPN as in SelfPatch (Yun et al. 2022, arXiv:2206.07990, supplement A and its code) and UPerNet as in Swin (Liu
et al. 2021, arXiv:2103.14030, appendix A2.3), whose settings for ADE20K SelfPatch (supplement C) and DRLoc (Liu et al.
2021, arXiv:2106.03746, appendix B.2) take. K classes."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.data.index import Note
from eagleray.models.backbone import Backbone
from eagleray.protocols.digests import digest, tree_digest, weights_digest
from eagleray.protocols.drop_path import set_drop_path
from eagleray.protocols.eval_mode import explain_failure
from eagleray.protocols.feature_maps import Maps
from eagleray.protocols.fine_tuning import Trainee, fine_tune
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.segmentation import scores as scoring
from eagleray.protocols.segmentation.data import IGNORED, Masks, crops, resized_shape
from eagleray.protocols.segmentation.heads import SemanticFPN, UPerNet
from eagleray.protocols.segmentation.picture import Comparison, draw, table
from eagleray.storage.ordered_map import ordered_map

WARMUP, RATIO = 1500, 1e-6  # steps, of the rate at the first
SHORT = 10  # a run shorter than ADE20K's warms up in one of so many steps
HELPER = 0.4  # weight of UPerNet's second classifier
PICTURES = 4


@dataclass(frozen=True)
class HeadSettings:
    """A head, and the settings that the papers train it with."""

    make: type[SemanticFPN] | type[UPerNet]
    width: int  # channels
    steps: int
    drop_path: float
    taps: tuple[int, ...]  # of twelve blocks of a ViT
    rescale: bool  # whether a ViT's maps become a pyramid


HEADS = {
    "fpn": HeadSettings(SemanticFPN, 256, 40_000, 0.1, (3, 6, 9, 12), rescale=False),
    "upernet": HeadSettings(UPerNet, 512, 160_000, 0.2, (4, 6, 8, 12), rescale=True),
}


def segmentation(
    backbone: Backbone,
    folder: Path,
    out: Path,
    note: Note,
    *,
    head: str = "fpn",
    steps: int | None = None,
    batch: int = 16,
    size: int = 512,
    lr: PositiveFloat = 6e-5,
    weight_decay: NonNegativeFloat = 0.01,
    width: int | None = None,
    multi_scale: bool = False,
    seed: NonNegativeInt = 0,
) -> Outcome:
    """Fine-tune a copy of the backbone on the training images of `folder` and score it on the validation images: mIoU,
    mAcc and aAcc in percent, with `multi_scale` also as means over six sizes and mirrored images. `size` is that of the
    crops and the images' short side; `width` channels of the head, where None stands for the paper's. The same call
    continues a training that was stopped. Raises UserError."""
    if head not in HEADS:
        raise UserError(f"--head {head}: expected {' or '.join(HEADS)}")
    if steps is not None and steps < 1:
        raise UserError(f"--steps {steps}: expected 1 or more")
    if width is not None and width < 2:
        raise UserError(f"--width {width}: expected 2 or more")
    if batch < 2:
        raise UserError(f"--batch {batch}: expected 2 or more, as batch norm needs several images")
    masks, kind = Masks.of(folder), HEADS[head]
    torch.manual_seed(seed)
    backbone = copy.deepcopy(backbone)
    weights = weights_digest(backbone)
    settings: dict[str, Any] = {
        "head": head,
        "width": width or kind.width,
        "steps": steps or kind.steps,
        "batch": batch,
        "size": size,
        "lr": lr,
        "weight_decay": weight_decay,
        "drop_path": set_drop_path(backbone.model, kind.drop_path),
        "train": len(masks.train),
        "val": len(masks.val),
        "classes": len(masks.classes),
        "seed": seed,
    }
    net = Segmenter(backbone, kind, len(masks.classes), settings["width"]).to(next(backbone.parameters()).device)
    net.try_size(size, resized_shape(masks.read(masks.val[0])[0], size))
    out.mkdir(parents=True, exist_ok=True)
    fine_tune(
        "segmentation",
        net,
        lambda start: batches(masks, settings, start, next(net.parameters()).device),
        steps=settings["steps"],
        batch=batch,
        lr=lambda at: poly(at.step, settings["steps"], lr),
        weight_decay=weight_decay,
        seed=seed,
        folder=out / f"segmentation-{head}-{digest(settings, weights, tree_digest(folder, times=True))[:8]}",
        note=note,
    )
    net.eval()
    return report(net, masks, settings, out, note, multi_scale=multi_scale)


class Segmenter(Trainee):
    """A backbone, its feature maps and a head."""

    def __init__(self, backbone: Backbone, kind: HeadSettings, classes: int, width: int) -> None:
        super().__init__()
        self.maps = Maps(backbone, kind.taps, rescale=kind.rescale)
        self.head = kind.make(self.maps.dims, classes, width=width)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """The loss of normalised crops (B, 3, H, W) with classes (B, H, W); a mean over the pixels that have one."""
        [x] = batch.views
        losses = [self.loss(z, batch.label) for z in self.raw(x)]
        return {"loss": losses[0] + HELPER * sum(losses[1:])}

    def raw(self, x: Tensor) -> list[Tensor]:
        """Scores (B, K, H, W), those of a second classifier too while training."""
        h, w = x.shape[2:]
        x = F.pad(x, (0, -w % self.maps.cell, 0, -h % self.maps.cell))
        found = self.head(self.maps(x))
        return [F.interpolate(z.float(), x.shape[2:], mode="bilinear")[..., :h, :w] for z in found]

    def scores(self, x: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) to scores (B, K, H, W)."""
        return self.raw(x)[0]

    @staticmethod
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, ignore_index=IGNORED)

    @torch.no_grad()
    def try_size(self, size: int, shape: tuple[int, int]) -> None:
        """Raises UserError where the backbone cannot take crops of `size` or images of `shape`."""
        self.eval()
        for h, w in ((size, size), shape):
            with explain_failure(
                self.maps.backbone, f"cannot take images of {w} x {h} pixels, as --size {size} asks for"
            ):
                self.scores(torch.zeros(1, 3, h, w, device=next(self.parameters()).device))


def batches(
    masks: Masks, settings: dict[str, Any], start: int, device: torch.device
) -> Iterator[tuple[Progress, Batch]]:
    """Steps from `start` on; an epoch counts as one step, as all schedules are in steps."""
    steps, batch = settings["steps"], settings["batch"]
    drawn = crops(masks, start=start, stop=steps, batch=batch, size=settings["size"], seed=settings["seed"])
    for step, (x, y) in enumerate(drawn, start):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        index = torch.arange(step * batch, (step + 1) * batch)
        yield Progress(step, 1, steps), Batch([x], index, y, (batch,))


def poly(step: int, steps: int, lr: float) -> float:
    """A straight line from `lr` to zero, below it by a straight line while it warms up: mmcv's poly of power 1 with a
    linear warm-up, of which SelfPatch's and Swin's ADE20K settings have 1500 steps."""
    warm = min(WARMUP, steps // SHORT)
    up = 1 - (1 - step / warm) * (1 - RATIO) if step < warm else 1.0
    return lr * up * (1 - step / steps)


def report(
    net: Segmenter,
    masks: Masks,
    settings: dict[str, Any],
    out: Path,
    note: Note,
    *,
    multi_scale: bool,
) -> Outcome:
    """Numbers, the table of classes and a picture of some of the validation images."""
    device, classes, name = next(net.parameters()).device, len(masks.classes), f"segmentation-{settings['head']}"
    single, several = (torch.zeros(classes, classes, dtype=torch.long) for _ in range(2))
    shown: list[Any] = []
    every = max(len(masks.val) // PICTURES, 1)
    for i, (image, truth) in enumerate(ordered_map(masks.read, masks.val)):
        x = image.to(device)
        found = scoring.probabilities(net.scores, x, size=settings["size"]).argmax(0).cpu()
        single += scoring.confusion(truth, found, classes)
        if multi_scale:
            mean = scoring.probabilities(net.scores, x, size=settings["size"], scales=scoring.SCALES, mirror=True)
            several += scoring.confusion(truth, mean.argmax(0).cpu(), classes)
        if i % every == 0 and len(shown) < PICTURES:
            shown.append(Comparison(image, truth, found))
    numbers = {f"segmentation/{n}": v for n, v in scoring.scores(single).items()}
    if multi_scale:
        numbers |= {f"segmentation/{n}_multi_scale": v for n, v in scoring.scores(several).items()}
        settings = {**settings, "scales": list(scoring.SCALES), "mirrored": True}
    table(out / f"{name}.csv", masks.classes, single)
    draw(out / f"{name}.png", shown, masks.classes)
    note(", ".join(f"{n} {v:.2f} %" for n, v in numbers.items()))
    return Outcome(numbers, settings, (out / f"{name}.png",))
