"""Read feature maps from any backbone, for detection and segmentation.

A hierarchical backbone has a map for each of its stages. A ViT has one for each of several blocks, all on the same
grid."""

from collections.abc import Sequence

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from eagleray.models.backbone import Backbone
from eagleray.protocols.eval_mode import explain_failure, in_eval_mode

SIZE = 224  # side of the image with which a backbone is probed, in pixels: a multiple of 7, 8, 14, 16 and 32
SHARES = (0.25, 0.5, 1.0, 2.0)  # sides of the cells of a ViT's four rescaled maps, relative to a patch
COARSEST = 32  # distance in pixels between cells of the last map of a hierarchical backbone


class Maps(nn.Module):
    """Map images (B, 3, H, W) to feature maps (B, dims[i], h, w), ordered from the finest to the coarsest.

    H and W are multiples of `cell`. `steps[i]` is the distance in pixels between neighbouring cells of map i.

    `taps` are blocks of a ViT, counted from 1 as if it had twelve; its maps are their outputs. With `rescale`, their
    grids become 4, 2, 1 and 1/2 times as fine, as in XCiT (El-Nouby et al. 2021, arXiv:2106.09681). Without it they
    keep the ViT's grid, as in SelfPatch's code for segmentation. Raises UserError when the backbone has no feature maps
    on a grid."""

    def __init__(self, backbone: Backbone, taps: Sequence[int], *, rescale: bool) -> None:
        super().__init__()
        self.backbone = backbone
        shapes = [x.shape for x in probe(backbone)]
        self.taps = list(range(len(shapes)))
        self.cell, self.steps = COARSEST, [SIZE / s[3] for s in shapes]
        if flat := len({s[2:] for s in shapes}) == 1:
            self.taps = [max(len(shapes) * tap // 12 - 1, 0) for tap in taps]
            self.cell = SIZE // shapes[0][2]
            self.steps = [self.cell * share for share in (SHARES if rescale else (1.0,) * len(taps))]
        self.dims = [shapes[tap][1] for tap in self.taps]
        parts: list[nn.Module] = [nn.Identity() for _ in self.dims]
        if flat and rescale:
            parts = rescalers(self.dims)
        elif not flat and any(isinstance(m, nn.LayerNorm) for m in backbone.modules()):
            parts = [
                LayerNorm2d(dim) for dim in self.dims
            ]  # outputs of stages have not passed a norm yet; Swin's code does the same
        self.scale = nn.ModuleList(parts)

    def forward(self, images: Tensor) -> list[Tensor]:
        _, grids = self.backbone.grids(images, "stages")
        return [scale(grids[tap]) for scale, tap in zip(self.scale, self.taps, strict=True)]


def rescalers(dims: Sequence[int]) -> list[nn.Module]:
    """Return the modules that make four maps of a ViT, with `dims` channels, 4, 2, 1 and 1/2 times as fine as its
    grid."""
    a, b, _, _ = dims
    up = nn.ConvTranspose2d(a, a, 2, 2), nn.BatchNorm2d(a), nn.GELU(), nn.ConvTranspose2d(a, a, 2, 2)
    return [nn.Sequential(*up), nn.ConvTranspose2d(b, b, 2, 2), nn.Identity(), nn.MaxPool2d(2)]


@torch.no_grad()
@in_eval_mode
def probe(backbone: Backbone) -> list[Tensor]:
    """Return the feature map of each stage or block for an image of zeros, SIZE pixels wide and high.

    Raises UserError when the backbone has fewer than two feature maps."""
    with explain_failure(backbone, f"gives no feature maps for an image of {SIZE} x {SIZE} pixels"):
        maps = backbone.grids(
            torch.zeros(1, backbone.channels, SIZE, SIZE, device=next(backbone.parameters()).device), "stages"
        )[1]
        if len(maps) < 2 or any(x.ndim != 4 for x in maps):
            raise ValueError(f"expected two or more feature maps (B, C, h, w), found {len(maps)} outputs")
    return maps
