"""Build Mask R-CNN on the output of a ResNet's third stage, with the fourth stage as its head: "C4" (He et al. 2017,
arXiv:1703.06870), as in Detectron2 and as MoCo fine-tunes it (He et al. 2020, arXiv:1911.05722)."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import freeze_batch_norm_2d
from timm.models.resnet import ResNet
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.roi_heads import maskrcnn_inference

from eagleray.base.errors import UserError
from eagleray.dense.detection.detectron_parts import Parts, region_pool
from eagleray.dense.detection.heads import (
    RATIOS,
    STAGES,
    BoxPredictor,
    Losses,
    Proposals,
    Shapes,
    Stage,
    Targets,
    assemble,
    matching,
)
from eagleray.dense.feature_maps import COARSEST, SIZE, probe
from eagleray.models.backbone import Backbone

SCALES = (0.25, 0.5, 1, 2, 4)  # widths of the anchors at each cell, relative to `anchor`
HIDDEN = 256  # channels of the layer before the mask scores
RANKED = {"training": 12_000, "testing": 6000}  # largest numbers of proposals, on the only map, before suppression


class ThreeStages(nn.Module):
    """Map images (B, 3, H, W) to the output (B, C, H / s, W / s) of a ResNet's third stage, which has stride s."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone.model.forward_features(images)


class MeanBoxPredictor(BoxPredictor):
    """A box head that averages R regions (R, D, h, w) over their cells, and returns class scores and box offsets."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.mean((2, 3)))


class LastStage(Stage):
    """The heads of C4. Boxes and masks of a region are predicted from the same features, the output of the fourth
    stage."""

    def forward(
        self, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes, targets: Targets = None
    ) -> tuple[list[dict[str, Tensor]], Losses]:
        results, losses = super().forward(features, proposals, shapes, targets)
        if not self.training:
            boxes, labels = [r["boxes"] for r in results], [r["labels"] for r in results]
            logits = self.mask_predictor(self.box_head(self.box_roi_pool(features, boxes, shapes)))
            for result, masks in zip(results, maskrcnn_inference(logits, labels), strict=True):
                result["masks"] = masks
        return results, losses

    def mask_features(
        self, features: dict[str, Tensor], boxes: list[Tensor], shapes: Shapes, x: Tensor, labels: list[Tensor]
    ) -> Tensor:
        """Return the rows of x, the box head's features, of the regions that have an object."""
        return x[torch.cat(labels) > 0]


def mask_rcnn_c4(
    backbone: Backbone,
    classes: int,
    *,
    frozen: bool,
    sizes: Sequence[int],
    longest: int,
    anchor: float,
    regions: int,
    parts: Parts,
) -> GeneralizedRCNN:
    """Build Mask R-CNN from a ResNet, whose fourth stage is taken out of the backbone and becomes the head.

    The anchors of a cell are 1/4, 1/2, 1, 2 and 4 times `anchor` cells wide. Unless the backbone's batch norm is
    `frozen`, a batch norm layer is added after the fourth stage (MoCo, appendix). The other settings are those of
    `heads.mask_rcnn`. Raises UserError when the backbone is no ResNet."""
    model: Any = resnet(backbone, "head=c4")
    before, after = probe(backbone)[-2:]
    stride, channels, width = SIZE // before.shape[3], before.shape[1], after.shape[1]
    last, model.layer4 = model.layer4, nn.Identity()
    heads = LastStage(
        region_pool(["0"], [stride], 14, parts),
        last if frozen else nn.Sequential(last, nn.BatchNorm2d(width)),
        MeanBoxPredictor(width, classes, shared=False),
        **matching(STAGES[0], regions),
        mask_predictor=MaskRCNNPredictor(width, HIDDEN, classes),
        parts=parts,
    )
    return assemble(
        ThreeStages(backbone),
        AnchorGenerator((tuple(anchor * stride * scale for scale in SCALES),), (RATIOS,)),
        Proposals(channels, len(SCALES) * len(RATIOS)),
        heads,
        ranked=RANKED,
        kept=2000,
        sizes=sizes,
        longest=longest,
        divisor=COARSEST,
        parts=parts,
    )


def freeze(backbone: Backbone) -> None:
    """Freeze the stem, the first stage and all batch norm layers of a ResNet, as Detectron2 does by default.

    Raises UserError when the backbone is no ResNet."""
    model = resnet(backbone, "frozen=true")
    device = next(model.parameters()).device
    freeze_batch_norm_2d(model.cpu()).to(device)  # timm creates the frozen layers on the CPU
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)


def resnet(backbone: Backbone, key: str) -> ResNet:
    """Return the ResNet inside a backbone. Raises UserError, which names the setting `key`, for any other model."""
    if not isinstance(backbone.model, ResNet):
        name = type(backbone.model).__name__
        raise UserError(f"--schedule: {key}: expected a ResNet as backbone, such as resnet50, got a {name}")
    return backbone.model
