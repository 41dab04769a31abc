"""Parts of Detectron2's and mmdetection's detectors that differ from torchvision's: how regions are aligned with the
cells of a map, the losses of boxes, and the number of proposals in training.

R is the number of regions, and C the number of classes; class 0 is the background."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import MultiScaleRoIAlign, generalized_box_iou_loss, roi_align
from torchvision.ops.poolers import LevelMapper

Parts = Literal["torchvision", "detectron2"]
GIOU_WEIGHT = 10.0  # weight of the GIoU loss, as in Swin's code


def region_pool(names: Sequence[str], strides: Sequence[int], side: int, parts: Parts) -> nn.Module:
    """Return the module that cuts regions (R, channels, side, side) from maps of these names and strides, in pixels."""
    if parts == "detectron2":
        return AlignedRegions(names, strides, side)
    return MultiScaleRoIAlign(list(names), side, sampling_ratio=0)


class AlignedRegions(nn.Module):
    """Cut each region from the map that suits its size, like torchvision's MultiScaleRoIAlign, but not half a cell off.

    torchvision moves regions by half a cell, as it takes the corner of a cell for its centre."""

    def __init__(self, names: Sequence[str], strides: Sequence[int], side: int) -> None:
        super().__init__()
        self.maps, self.side = list(zip(names, strides, strict=True)), side
        self.level = LevelMapper(strides[0].bit_length() - 1, strides[-1].bit_length() - 1)

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], shapes: Sequence[tuple[int, int]]) -> Tensor:
        """Return the regions (R, channels, side, side) of the boxes of all images."""
        rois = torch.cat([F.pad(b, (1, 0), value=i) for i, b in enumerate(boxes)])  # (R, 5) image index, x0, y0, x1, y1
        levels = self.level(boxes)
        rows = [torch.where(levels == i)[0] for i in range(len(self.maps))]
        cut = [
            roi_align(features[name], rois[r].contiguous(), self.side, 1 / stride, 0, aligned=True)
            for r, (name, stride) in zip(rows, self.maps, strict=True)
        ]
        return torch.cat(cut)[torch.cat(rows).argsort()]


class L1Proposals(RegionProposalNetwork):
    """A region proposal network whose box loss is an L1 loss instead of a smooth L1 loss."""

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of objectness and the loss of boxes, for anchors that are sampled from all images."""
        objects, others = (torch.where(torch.cat(chosen))[0] for chosen in self.fg_bg_sampler(labels))
        anchors = torch.cat([objects, others])
        score_loss = F.binary_cross_entropy_with_logits(objectness.flatten()[anchors], torch.cat(labels)[anchors])
        box_loss = F.l1_loss(pred_bbox_deltas[objects], torch.cat(regression_targets)[objects], reduction="sum")
        return score_loss, box_loss / len(anchors)


def l1_losses(
    scores: Tensor, offsets: Tensor, labels: list[Tensor], box_targets: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the classification loss of scores (R, C), and the L1 loss of box offsets (R, 4 C), a sum divided by R."""
    y, goals = torch.cat(labels), torch.cat(box_targets)
    objects = torch.where(y > 0)[0]
    own = offsets.unflatten(1, (-1, 4))[objects, y[objects]]
    return F.cross_entropy(scores, y), F.l1_loss(own, goals[objects], reduction="sum") / len(y)


def own(offsets: Tensor, scores: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return the box offsets (R, 4) of one class for each region: of its label (R,) if that is an object, otherwise of
    the object class with the highest of `scores` (R, C)."""
    y = scores[:, 1:].argmax(1) + 1
    y = y if labels is None else torch.where(labels > 0, labels, y)
    return offsets.unflatten(1, (-1, 4))[torch.arange(len(y), device=y.device), y]


def giou_loss(
    coder: BoxCoder, offsets: Tensor, labels: Tensor, box_targets: Tensor, regions: Sequence[Tensor]
) -> Tensor:
    """Return the weighted sum of 1 - GIoU (Rezatofighi et al. 2019, arXiv:1902.09630) over the objects, divided by R.

    The `offsets` (R, 4 C) and `box_targets` (R, 4), relative to `regions`, are decoded to boxes in pixels for this."""
    objects = torch.where(labels > 0)[0]
    rows = torch.cat(list(regions))[objects]
    found = coder.decode_single(offsets.unflatten(1, (-1, 4))[objects, labels[objects]], rows)
    goals = coder.decode_single(box_targets[objects], rows)
    return GIOU_WEIGHT * generalized_box_iou_loss(found, goals, reduction="sum") / len(labels)
