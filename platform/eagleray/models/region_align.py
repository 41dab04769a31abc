"""RoIAlign for one box per image, before a CNN's last stage, as in "C4" (He et al. 2017, arXiv:1703.06870).

B images, D channels, maps of h x w cells. Boxes (B, 4) are left, top, right and bottom."""

from functools import partial
from typing import Any

import torch
from timm.models.convnext import ConvNeXt
from timm.models.resnet import ResNet
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.models.checkpointing import micro_batched
from eagleray.models.stages import stages

LONGEST = 2  # longest side of a box, as a multiple of the map's side


def check_convolutional(backbone: Backbone) -> None:
    """Raises UserError when `pooled_regions` cannot cut boxes out of the backbone's maps."""
    if not isinstance(backbone.model, ResNet | ConvNeXt):
        name = type(backbone.model).__name__
        raise UserError(
            f"backbone.name: expected a CNN with stages, a ResNet or a ConvNeXt, to cut boxes from; got a {name}"
        )


def pooled_regions(backbone: Backbone, images: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Return the pooled vectors (B, D) of one box of each image (B, 3, S, S); `boxes` (B, 4) are in pixels.

    The last stage sees only the box, as side x side cells cut from the map of the stage before."""
    size = backbone.at_once
    return micro_batched(partial(_pooled_regions, backbone.model, side), images, size, boxes)


def _pooled_regions(model: Any, side: int, images: Tensor, boxes: Tensor) -> Tensor:
    def cut(stage: nn.Module, args: Any, maps: Tensor) -> Tensor:
        return roi_align(maps, boxes * (maps.shape[3] / images.shape[3]), side)

    with stages(model)[-2].register_forward_hook(cut):  # each call has a new hook, so it is not compiled
        out: Tensor = model.forward_head(model.forward_features(images), pre_logits=True)
    return out


def roi_align(maps: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Return one box of each map (B, D, h, w), resampled to (B, D, side, side); `boxes` (B, 4) are in cells of the map.

    The result is that of torchvision's roi_align with `aligned=True` and an adaptive number of samples. With one box
    per image the mean of bilinear samples is a product with a matrix for the rows and one for the columns. On a GPU its
    gradient is summed in a fixed order, unlike that of torchvision's kernel."""
    left, top, right, bottom = boxes.unbind(1)
    rows, columns = (_weights(*x, side) for x in ((top, bottom, maps.shape[2]), (left, right, maps.shape[3])))
    return rows.unsqueeze(1).to(maps.dtype) @ maps @ columns.unsqueeze(1).mT.to(maps.dtype)


def _weights(first: Tensor, last: Tensor, cells: int, side: int) -> Tensor:
    """Return the weights (B, side, cells) of an axis's cells in `side` bins from `first` to `last` (B,), in cells."""
    first, step = first.view(-1, 1, 1), ((last - first) / side).view(-1, 1, 1)
    most = -(-LONGEST * cells // side)
    samples = step.ceil().clamp(1, most)
    number, bins, at = (torch.arange(n, device=first.device) for n in (most, side, cells))
    centre = first + (bins.view(-1, 1) + (number + 0.5) / samples) * step - 0.5  # (B, side, most)
    # As in torchvision, a sample more than a cell outside the map is 0, and a nearer one has the value at the edge.
    counted = (number < samples) & (centre >= -1) & (centre <= cells)
    near = (1 - (centre.clamp(0, cells - 1).unsqueeze(3) - at).abs()).clamp(min=0)  # (B, side, most, cells)
    return (near * (counted / samples).unsqueeze(3)).sum(2)
