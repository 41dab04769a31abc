"""Mask R-CNN (He et al. 2017, arXiv:1703.06870) and Cascade Mask R-CNN (Cai and Vasconcelos 2018, arXiv:1712.00726)
from torchvision's parts. R regions, C classes with the background, which is class 0."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, remove_small_boxes

from eagleray.protocols.detection.pyramid import FeaturePyramid

Losses = dict[str, Tensor]
Targets = list[dict[str, Tensor]] | None
Shapes = list[tuple[int, int]]  # height and width of each image
RATIOS = (0.5, 1.0, 2.0)  # of anchors, height by width
HIDDEN = 1024  # of the two layers of a box head
# Of each stage of a cascade: the overlap from which on a region is an object, what box offsets are multiplied with, and
# the weight of its losses (Cai and Vasconcelos, section 4; the weights are those of mmdetection's settings).
STAGES = ((0.5, 10.0, 1.0), (0.6, 20.0, 0.5), (0.7, 30.0, 0.25))


class Proposals(RPNHead):
    """In float32 whatever the maps are in: the offsets carry places of a pixel in a thousand."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, offsets = super().forward(x)
        return [s.float() for s in scores], [o.float() for o in offsets]


class Boxes(FastRCNNPredictor):
    """Scores (R, C) and offsets (R, 4 C) in float32, the offsets of all classes alike where `shared`."""

    def __init__(self, dim: int, classes: int, *, shared: bool) -> None:
        super().__init__(dim, classes)
        self.repeats = classes if shared else 1
        if shared:
            self.bbox_pred = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x).float(), self.bbox_pred(x).float().repeat(1, self.repeats)


def mask_rcnn(
    pyramid: FeaturePyramid,
    classes: int,
    *,
    cascade: bool,
    sizes: Sequence[int],
    longest: int,
    anchor: float,
    regions: int,
) -> MaskRCNN:
    """torchvision's model, for images with values from 0 to 1 that it scales and normalises itself. `sizes` of the
    short side, one of which is drawn in training, the last one else; anchors are `anchor` cells wide; `regions` of an
    image are learnt from."""
    channels, coarsest = pyramid.out_channels, pyramid.strides[-2]
    anchors = AnchorGenerator(tuple((anchor * s,) for s in pyramid.strides), (RATIOS,) * len(pyramid.strides))
    stages = [roi_heads(pyramid, classes, s, regions, shared=cascade) for s in (STAGES if cascade else STAGES[:1])]
    first = stages[0]
    net = MaskRCNN(
        pyramid,
        rpn_anchor_generator=anchors,
        rpn_head=Proposals(channels, len(RATIOS)),
        box_roi_pool=first.box_roi_pool,
        box_head=first.box_head,
        box_predictor=first.box_predictor,
        mask_roi_pool=first.mask_roi_pool,
        mask_head=first.mask_head,
        mask_predictor=first.mask_predictor,
        box_batch_size_per_image=regions,
        min_size=tuple(sizes),
        max_size=longest,
        size_divisible=max(coarsest, 32),
    )
    if cascade:
        net.roi_heads = Cascade(stages)
    return net


def roi_heads(
    pyramid: FeaturePyramid, classes: int, stage: tuple[float, float, float], regions: int, *, shared: bool
) -> RoIHeads:
    """The box and mask heads of a stage of a cascade; the first one is Mask R-CNN's."""
    overlap, precision, _ = stage
    channels = pyramid.out_channels
    return RoIHeads(
        MultiScaleRoIAlign(pyramid.names, 7, sampling_ratio=0),
        TwoMLPHead(channels * 7 * 7, HIDDEN),
        Boxes(HIDDEN, classes, shared=shared),
        fg_iou_thresh=overlap,
        bg_iou_thresh=overlap,
        batch_size_per_image=regions,
        positive_fraction=0.25,
        bbox_reg_weights=(precision, precision, precision / 2, precision / 2),
        score_thresh=0.05,
        nms_thresh=0.5,
        detections_per_img=100,
        mask_roi_pool=MultiScaleRoIAlign(pyramid.names, 14, sampling_ratio=0),
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, classes),
    )


class Cascade(nn.Module):
    """Heads one after the other, each of which works on the boxes of the one before. The scores and masks of all stages
    are averaged, the boxes are the last stage's."""

    def __init__(self, stages: Sequence[RoIHeads]) -> None:
        super().__init__()
        self.stages: Any = nn.ModuleList(stages)

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        shapes: Shapes,
        targets: Targets = None,
    ) -> tuple[list[dict[str, Tensor]], Losses]:
        if self.training:
            return [], self.learn(features, proposals, shapes, targets)
        return self.detect(features, proposals, shapes), {}

    def learn(self, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes, targets: Targets) -> Losses:
        assert targets is not None
        losses: Losses = {}
        for i, (heads, (_, _, weight)) in enumerate(zip(self.stages, STAGES, strict=True)):
            proposals, matched, labels, wanted = heads.select_training_samples(proposals, targets)
            scores, offsets = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, proposals, shapes)))
            judged, placed = fastrcnn_loss(scores, offsets, labels, wanted)
            objects = [torch.where(y > 0)[0] for y in labels]
            boxes = [p[on] for p, on in zip(proposals, objects, strict=True)]
            which = [m[on] for m, on in zip(matched, objects, strict=True)]
            logits = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(features, boxes, shapes)))
            masks = [t["masks"] for t in targets], [t["labels"] for t in targets]
            covered = maskrcnn_loss(logits, boxes, *masks, which)
            for name, loss in (("classifier", judged), ("box_reg", placed), ("mask", covered)):
                losses[f"loss_{name}_{i + 1}"] = weight * loss
            moved = refine(heads, offsets.detach(), proposals, shapes)
            proposals = [b[remove_small_boxes(b, 1e-2)] for b in moved]  # an offset from no width would be infinite
        return losses

    def detect(self, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes) -> list[dict[str, Tensor]]:
        shares, inputs, offsets = [], proposals, torch.empty(0)
        for i, heads in enumerate(self.stages):
            inputs = proposals if i == 0 else refine(self.stages[i - 1], offsets, inputs, shapes)  # type: ignore[arg-type]
            scores, offsets = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, inputs, shapes)))
            shares.append(scores.softmax(1))
        mean = torch.stack(shares).mean(0).log()  # of which the softmax is the mean again
        found = self.stages[-1].postprocess_detections(mean, offsets, inputs, shapes)
        out = [{"boxes": b, "scores": s, "labels": y} for b, s, y in zip(*found, strict=True)]
        boxes, labels = [r["boxes"] for r in out], [r["labels"] for r in out]
        masks = [
            maskrcnn_inference(h.mask_predictor(h.mask_head(h.mask_roi_pool(features, boxes, shapes))), labels)
            for h in self.stages
        ]
        for result, *each in zip(out, *masks, strict=True):
            result["masks"] = torch.stack(each).mean(0)
        return out


def refine(heads: RoIHeads, offsets: Tensor, boxes: list[Tensor], shapes: Shapes) -> list[Tensor]:
    """Boxes of each image moved by the offsets (R, 4 C), those of all classes alike, of all regions, and cut off at the
    border of the image."""
    moved = heads.box_coder.decode(offsets[:, :4], boxes).view(-1, 4).split([len(b) for b in boxes])
    return [clip_boxes_to_image(b, shape) for b, shape in zip(moved, shapes, strict=True)]
