"""Build Mask R-CNN (He et al. 2017, arXiv:1703.06870) and Cascade Mask R-CNN (Cai and Vasconcelos 2018,
arXiv:1712.00726) from torchvision's parts.

R is the number of regions, and C the number of classes; class 0 is the background."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import clip_boxes_to_image, remove_small_boxes

from eagleray.dense.detection.detectron_parts import L1Proposals, Parts, giou_loss, l1_losses, own, region_pool
from eagleray.dense.detection.pyramid import FeaturePyramid

Losses = dict[str, Tensor]
Targets = list[dict[str, Tensor]] | None
Shapes = list[tuple[int, int]]  # height and width of each image
RATIOS = (0.5, 1.0, 2.0)  # aspect ratios of the anchors: height / width
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's pixels, with values from 0 to 1
HIDDEN = 1024  # width of the two hidden layers of a box head
# For each stage of a cascade: the lowest IoU of a region with its object, the factor of the box offsets (Cai and
# Vasconcelos, section 4), and the weight of the losses (mmdetection).
STAGES = ((0.5, 10.0, 1.0), (0.6, 20.0, 0.5), (0.7, 30.0, 0.25))


class Proposals(RPNHead):
    """A region proposal head with float32 outputs even in mixed precision; bfloat16 is too coarse for box offsets."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scores, offsets = super().forward(x)
        return [s.float() for s in scores], [o.float() for o in offsets]


class BoxPredictor(FastRCNNPredictor):
    """A box head that returns class scores (R, C) and box offsets in float32: (R, 4 C), one box for each class.

    With `shared`, the offsets are the same for all classes."""

    def __init__(self, dim: int, classes: int, *, shared: bool) -> None:
        super().__init__(dim, classes)
        self.repeats = classes if shared else 1
        if shared:
            self.bbox_pred = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cls_score(x).float(), self.bbox_pred(x).float().repeat(1, self.repeats)


class Stage(RoIHeads):
    """torchvision's box and mask heads, alone or as a stage of a cascade. The loss of boxes may also be L1 or GIoU."""

    def __init__(self, *args: Any, parts: Parts, giou: bool = False, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.giou = giou
        self.box_losses = l1_losses if parts == "detectron2" else fastrcnn_loss

    def forward(
        self, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes, targets: Targets = None
    ) -> tuple[list[dict[str, Tensor]], Losses]:
        if self.training:
            return [], self.losses(features, proposals, shapes, targets)[0]
        return super().forward(features, proposals, shapes)

    def losses(
        self, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes, targets: Targets
    ) -> tuple[Losses, list[Tensor], Tensor]:
        """Return the losses, the regions sampled for them in each image, and the predicted offsets (R, 4) of the
        regions."""
        assert targets is not None
        regions, matches, labels, box_targets = self.select_training_samples(proposals, targets)
        x = self.box_head(self.box_roi_pool(features, regions, shapes))
        scores, offsets = self.box_predictor(x)
        class_loss, box_loss = self.box_losses(scores, offsets, labels, box_targets)
        if self.giou:
            box_loss = giou_loss(self.box_coder, offsets, torch.cat(labels), torch.cat(box_targets), regions)
        objects = [torch.where(y > 0)[0] for y in labels]
        boxes = [r[on] for r, on in zip(regions, objects, strict=True)]
        which = [m[on] for m, on in zip(matches, objects, strict=True)]
        logits = self.mask_predictor(self.mask_features(features, boxes, shapes, x, labels))
        masks = [t["masks"] for t in targets], [t["labels"] for t in targets]
        mask_loss = maskrcnn_loss(logits, boxes, *masks, which)
        losses = {"loss_classifier": class_loss, "loss_box_reg": box_loss, "loss_mask": mask_loss}
        return losses, regions, own(offsets, scores, torch.cat(labels))

    def mask_features(
        self, features: dict[str, Tensor], boxes: list[Tensor], shapes: Shapes, x: Tensor, labels: list[Tensor]
    ) -> Tensor:
        """Return the features from which the masks of `boxes` are predicted: the regions whose label is above 0.

        `x` is the output of the box head for all regions. Subclasses without a separate mask head return rows of it."""
        return self.mask_head(self.mask_roi_pool(features, boxes, shapes))


def mask_rcnn(
    pyramid: FeaturePyramid,
    classes: int,
    *,
    cascade: bool,
    sizes: Sequence[int],
    longest: int,
    anchor: float,
    regions: int,
    parts: Parts = "torchvision",
    convolutions: bool = False,
) -> GeneralizedRCNN:
    """Build Mask R-CNN or, with `cascade`, Cascade Mask R-CNN on a feature pyramid.

    Anchors are `anchor` cells wide, and `regions` regions of each image enter the loss. With `convolutions`, a box head
    has four convolutions and one linear layer, as in Swin's code, and each stage of a cascade predicts offsets for each
    class. The other settings are those of `assemble`."""
    anchors = AnchorGenerator(tuple((anchor * s,) for s in pyramid.strides), (RATIOS,) * len(pyramid.strides))
    stages = [
        roi_heads(
            pyramid, classes, s, regions, shared=cascade and not convolutions, parts=parts, convolutions=convolutions
        )
        for s in (STAGES if cascade else STAGES[:1])
    ]
    return assemble(
        pyramid,
        anchors,
        Proposals(pyramid.out_channels, len(RATIOS)),
        Cascade(stages) if cascade else stages[0],
        ranked={"training": 2000, "testing": 1000},
        kept=1000 if parts == "detectron2" else 2000,
        sizes=sizes,
        longest=longest,
        divisor=max(pyramid.strides[-2], 32),
        parts=parts,
    )


def assemble(
    trunk: nn.Module,
    anchors: AnchorGenerator,
    proposals: RPNHead,
    heads: nn.Module,
    *,
    ranked: dict[str, int],
    kept: int,
    sizes: Sequence[int],
    longest: int,
    divisor: int,
    parts: Parts,
) -> GeneralizedRCNN:
    """Build torchvision's model from its parts. The model itself resizes and normalises images with values from 0 to 1.

    In training the short side of an image is drawn from `sizes`; otherwise it is the last of them. `longest` limits the
    long side, and both sides are padded to multiples of `divisor`. On each map the best `ranked` proposals enter
    non-maximum suppression. In training, `kept` proposals of an image remain after it, otherwise 1000."""
    network = L1Proposals if parts == "detectron2" else RegionProposalNetwork
    rpn = network(anchors, proposals, 0.7, 0.3, 256, 0.5, ranked, {"training": kept, "testing": 1000}, 0.7)
    transform = GeneralizedRCNNTransform(tuple(sizes), longest, MEAN, STD, size_divisible=divisor)  # type: ignore[arg-type]
    return GeneralizedRCNN(trunk, rpn, heads, transform)


def roi_heads(
    pyramid: FeaturePyramid,
    classes: int,
    stage: tuple[float, float, float],
    regions: int,
    *,
    shared: bool,
    parts: Parts,
    convolutions: bool,
) -> Stage:
    """Build the box and mask heads of one `stage` of STAGES. Mask R-CNN has only the first stage of a cascade."""
    channels, strides = pyramid.out_channels, pyramid.strides[:-1]
    box_head = (
        FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [HIDDEN], norm_layer=nn.BatchNorm2d)
        if convolutions
        else TwoMLPHead(channels * 7 * 7, HIDDEN)
    )
    return Stage(
        region_pool(pyramid.names, strides, 7, parts),
        box_head,
        BoxPredictor(HIDDEN, classes, shared=shared),
        **matching(stage, regions),
        mask_roi_pool=region_pool(pyramid.names, strides, 14, parts),
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, classes),
        parts=parts,
        giou=convolutions,
    )


def matching(stage: tuple[float, float, float], regions: int) -> dict[str, Any]:
    """Return torchvision's settings for a stage: how regions are sampled in training, and which detections are kept."""
    overlap, precision, _ = stage
    return {
        "fg_iou_thresh": overlap,
        "bg_iou_thresh": overlap,
        "batch_size_per_image": regions,
        "positive_fraction": 0.25,
        "bbox_reg_weights": (precision, precision, precision / 2, precision / 2),
        "score_thresh": 0.05,
        "nms_thresh": 0.5,
        "detections_per_img": 100,
    }


class Cascade(nn.Module):
    """A cascade of stages, each of which refines the boxes of the previous one.

    Scores and masks are means over the stages, and the boxes are those of the last stage."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self.stages: Any = nn.ModuleList(stages)

    def forward(
        self, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes, targets: Targets = None
    ) -> tuple[list[dict[str, Tensor]], Losses]:
        if self.training:
            return [], self.losses(features, proposals, shapes, targets)
        return self.detect(features, proposals, shapes), {}

    def losses(self, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes, targets: Targets) -> Losses:
        """Return the losses of all stages, each times the weight of its stage."""
        losses: Losses = {}
        for i, (heads, (_, _, weight)) in enumerate(zip(self.stages, STAGES, strict=True)):
            own, regions, offsets = heads.losses(features, proposals, shapes, targets)
            losses |= {f"{name}_{i + 1}": weight * loss for name, loss in own.items()}
            boxes = refine(heads, offsets.detach(), regions, shapes)
            proposals = [b[remove_small_boxes(b, 1e-2)] for b in boxes]  # boxes without width have infinite offsets
        return losses

    def detect(self, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes) -> list[dict[str, Tensor]]:
        """Return the boxes, scores, labels and masks of the objects in each image."""
        probabilities, inputs, offsets, scores = [], proposals, torch.empty(0), torch.empty(0)
        for i, heads in enumerate(self.stages):
            inputs = proposals if i == 0 else refine(self.stages[i - 1], own(offsets, scores), inputs, shapes)  # type: ignore[arg-type]
            scores, offsets = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, inputs, shapes)))
            probabilities.append(scores.softmax(1))
        mean = torch.stack(probabilities).mean(0).log()  # torchvision applies a softmax, which undoes this log
        results = self.stages[-1].postprocess_detections(mean, offsets, inputs, shapes)
        out = [{"boxes": b, "scores": s, "labels": y} for b, s, y in zip(*results, strict=True)]
        boxes, labels = [r["boxes"] for r in out], [r["labels"] for r in out]
        masks = [
            maskrcnn_inference(h.mask_predictor(h.mask_head(h.mask_roi_pool(features, boxes, shapes))), labels)
            for h in self.stages
        ]
        for result, *each in zip(out, *masks, strict=True):
            result["masks"] = torch.stack(each).mean(0)
        return out


def refine(heads: RoIHeads, offsets: Tensor, boxes: list[Tensor], shapes: Shapes) -> list[Tensor]:
    """Move the boxes of each image by the first four columns of `offsets`, and clip them to the image.

    `offsets` (R, 4 or more) are those of the regions of all images."""
    refined = heads.box_coder.decode(offsets[:, :4], boxes).view(-1, 4).split([len(b) for b in boxes])
    return [clip_boxes_to_image(b, shape) for b, shape in zip(refined, shapes, strict=True)]
