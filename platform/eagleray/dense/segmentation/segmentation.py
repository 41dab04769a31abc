"""Fine-tune a backbone for semantic segmentation, with a head that predicts the class of every pixel.

The head is Semantic FPN, as in SelfPatch (Yun et al. 2022, arXiv:2206.07990, supplement A and its code), or UPerNet, as
in Swin (Liu et al. 2021, arXiv:2103.14030, appendix A2.3). SelfPatch (supplement C) and DRLoc (Liu et al. 2021,
arXiv:2106.03746, appendix B.2) also use UPerNet's settings for ADE20K. K is the number of classes."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.dense.catalogue import Segmentation
from eagleray.dense.feature_maps import Maps
from eagleray.dense.segmentation import scores as scoring
from eagleray.dense.segmentation.data import IGNORED, Masks, crops, resized_shape
from eagleray.dense.segmentation.heads import SemanticFPN, UPerNet
from eagleray.dense.segmentation.picture import Comparison, draw, table
from eagleray.models.backbone import Backbone
from eagleray.protocols.digests import digest, tree_digest, weights_digest
from eagleray.protocols.eval_mode import explain_failure
from eagleray.protocols.fine_tuning import Trainee, divide, fine_tune, own, read_beforehand, set_drop_path
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Workspace
from eagleray.storage.ordered_map import ordered_map

WARMUP, RATIO = 1500, 1e-6  # number of warm-up steps, and the factor of the learning rate at their start
SHORT = 10  # a short training warms up in a tenth of its steps
HELPER = 0.4  # weight of the loss of UPerNet's auxiliary classifier
PICTURES = 4  # number of images in the picture


@dataclass(frozen=True)
class HeadSettings:
    """A type of segmentation head, and the settings with which the papers train it."""

    make: type[SemanticFPN] | type[UPerNet]
    width: int  # number of channels
    steps: int
    drop_path: float
    taps: tuple[int, ...]  # blocks of a ViT whose outputs are read, counted as if it had twelve
    rescale: bool  # whether a ViT's maps are rescaled to a pyramid of grids


HEADS = {
    "fpn": HeadSettings(SemanticFPN, 256, 40_000, 0.1, (3, 6, 9, 12), rescale=False),
    "upernet": HeadSettings(UPerNet, 512, 160_000, 0.2, (4, 6, 8, 12), rescale=True),
}


def segmentation(backbone: Backbone, folder: Path, protocol: Segmentation, workspace: Workspace) -> Outcome:
    """Fine-tune a copy of the backbone on the training images of `folder`, and test it on the validation images.

    mIoU, mAcc and aAcc are measured in percent. With `multi_scale` they are also measured for predictions averaged over
    six sizes and mirror images. A call with the same arguments continues a stopped training from its checkpoint in the
    workspace. Several ranks share the work; rank 0 returns the outcome, and writes pictures and checkpoints. Raises
    UserError when a setting or the data are wrong, or the backbone does not fit them."""
    check(protocol)
    head, steps, batch, size, seed = protocol.head, protocol.steps, protocol.batch, protocol.size, protocol.seed
    masks, kind, rows = Masks.of(folder), HEADS[head], divide(batch)
    torch.manual_seed(seed)
    backbone = copy.deepcopy(backbone).requires_grad_(True)  # a momentum teacher's parameters are frozen
    weights = weights_digest(backbone, workspace.backbone)
    settings: dict[str, Any] = {
        "head": head,
        "width": protocol.width or kind.width,
        "steps": steps or kind.steps,
        "batch": batch,
        "size": size,
        "lr": protocol.lr,
        "weight_decay": protocol.weight_decay,
        "drop_path": set_drop_path(backbone.model, kind.drop_path),
        "train": len(masks.train),
        "val": len(masks.val),
        "classes": len(masks.classes),
        "seed": seed,
    }
    net = Segmenter(backbone, kind, len(masks.classes), settings["width"]).to(next(backbone.parameters()).device)
    net.try_size(size, resized_shape(masks.read(masks.val[0])[0], size))
    read_beforehand(masks.read, masks.val)
    name = f"segmentation-{head}-{digest(settings, weights, tree_digest(folder, times=True))[:8]}"
    fine_tune(
        "segmentation",
        net,
        lambda start: batches(masks, settings, rows, start, next(net.parameters()).device),
        steps=settings["steps"],
        batch=batch,
        lr=lambda at: poly(at.step, settings["steps"], protocol.lr),
        weight_decay=protocol.weight_decay,
        seed=seed,
        folder=f"{workspace.checkpoints}/{name}",
        scratch=workspace.out / name,
        note=workspace.note,
    )
    net.eval()
    return report(net, masks, settings, workspace, multi_scale=protocol.multi_scale)


def check(protocol: Segmentation) -> None:
    """Raise UserError when head, steps, width or batch has a value that is not allowed."""
    head, steps, width, batch = protocol.head, protocol.steps, protocol.width, protocol.batch
    if head not in HEADS:
        raise UserError(f"--head {head}: expected {' or '.join(HEADS)}")
    if steps is not None and steps < 1:
        raise UserError(f"--steps {steps}: expected 1 or more")
    if width is not None and width < 2:
        raise UserError(f"--width {width}: expected 2 or more")
    if batch < 2:
        raise UserError(f"--batch {batch}: expected 2 or more, as batch norm needs several images")


class Segmenter(Trainee):
    """A network that predicts the class of every pixel: a backbone, its feature maps and a head."""

    def __init__(self, backbone: Backbone, kind: HeadSettings, classes: int, width: int) -> None:
        super().__init__()
        self.maps = Maps(backbone, kind.taps, rescale=kind.rescale)
        self.head = kind.make(self.maps.dims, classes, width=width)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Return the loss of a batch of normalised crops (B, 3, H, W) with labels (B, H, W).

        Its mean over ranks, weighted by their rows, is a mean over all pixels of the global batch that have a class."""
        [x] = batch.views
        pixels = dist.total((batch.label != IGNORED).sum().float())
        share = batch.rows[dist.rank()] / sum(batch.rows)
        losses = [self.loss(z, batch.label) / pixels / share for z in self.raw(x)]
        return {"loss": losses[0] + HELPER * sum(losses[1:])}

    def raw(self, x: Tensor) -> list[Tensor]:
        """Return the class scores (B, K, H, W) of each classifier of the head: one, or two for UPerNet in training."""
        h, w = x.shape[2:]
        x = F.pad(x, (0, -w % self.maps.cell, 0, -h % self.maps.cell))
        scores = self.head(self.maps(x))
        return [F.interpolate(z.float(), x.shape[2:], mode="bilinear")[..., :h, :w] for z in scores]

    def scores(self, x: Tensor) -> Tensor:
        """Return class scores (B, K, H, W) for normalised images (B, 3, H, W)."""
        return self.raw(x)[0]

    @staticmethod
    def loss(z: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of scores z (B, K, H, W) and classes y (B, H, W), without IGNORED
        pixels."""
        return F.cross_entropy(z, y, ignore_index=IGNORED, reduction="sum")

    @torch.no_grad()
    def try_size(self, size: int, shape: tuple[int, int]) -> None:
        """Raise UserError when the backbone cannot process crops of side `size` or images of `shape` (H, W)."""
        self.eval()
        for h, w in ((size, size), shape):
            with explain_failure(
                self.maps.backbone, f"cannot take images of {w} x {h} pixels, as --size {size} asks for"
            ):
                self.scores(torch.zeros(1, 3, h, w, device=next(self.parameters()).device))


def batches(
    masks: Masks, settings: dict[str, Any], rows: tuple[int, ...], start: int, device: torch.device
) -> Iterator[tuple[Progress, Batch]]:
    """Yield this rank's part of each training batch from step `start` on, with the progress of the training.

    `rows` are the numbers of rows of all ranks. Every step counts as an epoch, because all schedules are in steps."""
    steps, batch, mine = settings["steps"], settings["batch"], own(rows)
    stream = crops(masks, start=start, stop=steps, batch=batch, rows=mine, size=settings["size"], seed=settings["seed"])
    for step, (x, y) in enumerate(stream, start):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        index = torch.arange(mine.start, mine.stop) + step * batch
        yield Progress(step, 1, steps), Batch([x], index, y, rows)


def poly(step: int, steps: int, lr: float) -> float:
    """Return the learning rate of a step: mmcv's poly schedule of power 1 with a linear warm-up.

    The rate falls linearly from `lr` to zero. During the warm-up it is also multiplied by a factor that rises linearly
    to 1. SelfPatch and Swin warm up for 1500 steps on ADE20K."""
    warm = min(WARMUP, steps // SHORT)
    up = 1 - (1 - step / warm) * (1 - RATIO) if step < warm else 1.0
    return lr * up * (1 - step / steps)


def report(
    net: Segmenter, masks: Masks, settings: dict[str, Any], workspace: Workspace, *, multi_scale: bool
) -> Outcome:
    """Score the network on the validation images, write a table of the scores of each class, and draw some images.

    Each rank predicts a part of the images. Rank 0 writes, and returns the outcome; others return an empty one."""
    device, classes, name = next(net.parameters()).device, len(masks.classes), f"segmentation-{settings['head']}"
    single, several = (torch.zeros(classes, classes, dtype=torch.long) for _ in range(2))
    samples: list[tuple[int, Comparison]] = []
    every = max(len(masks.val) // PICTURES, 1)
    mine = range(dist.rank(), len(masks.val), dist.size())
    for i, (image, truth) in zip(mine, ordered_map(masks.read, (masks.val[i] for i in mine)), strict=True):
        x = image.to(device)
        prediction = scoring.probabilities(net.scores, x, size=settings["size"]).argmax(0).cpu()
        single += scoring.confusion(truth, prediction, classes)
        if multi_scale:
            mean = scoring.probabilities(net.scores, x, size=settings["size"], scales=scoring.SCALES, mirror=True)
            several += scoring.confusion(truth, mean.argmax(0).cpu(), classes)
        if i % every == 0 and i // every < PICTURES:
            samples.append((i, Comparison(image, truth, prediction)))
    single, several = (dist.total(counts.to(device)).cpu() for counts in (single, several))  # NCCL sums GPU tensors
    parts = dist.gather_at_zero(samples)
    if parts is None:
        return Outcome({})
    numbers = {f"segmentation/{n}": v for n, v in scoring.scores(single).items()}
    if multi_scale:
        numbers |= {f"segmentation/{n}_multi_scale": v for n, v in scoring.scores(several).items()}
        settings = {**settings, "scales": list(scoring.SCALES), "mirrored": True}
    out = workspace.out
    table(out / f"{name}.csv", masks.classes, single)
    drawn = sorted((sample for part in parts for sample in part), key=lambda sample: sample[0])
    draw(out / f"{name}.png", [comparison for _, comparison in drawn], masks.classes)
    workspace.note(", ".join(f"{n} {v:.2f} %" for n, v in numbers.items()))
    return Outcome(numbers, settings, (out / f"{name}.png",), (out / f"{name}.csv",))
