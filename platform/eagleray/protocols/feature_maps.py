"""Maps of an image from any backbone, for what finds objects or tells the class of every pixel: the stages of a
pyramid, or blocks of a ViT, which all work on one grid."""

from collections.abc import Sequence

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from eagleray.models.backbone import Backbone
from eagleray.protocols.eval_mode import evaluating, trying

SIZE = 224  # pixels of an image that patches of 7, 8, 14, 16 and 32 all fit into
SHARES = (0.25, 0.5, 1.0, 2.0)  # of a ViT's patch: the cells of its rescaled maps
COARSEST = 32  # pixels from cell to cell of the last map of a pyramid


class Maps(nn.Module):
    """Images (B, 3, H, W), each side a multiple of `cell`, to maps (B, dims[i], h, w), the finest first.

    A ViT's are read after the blocks `taps`, counted from 1 as if it had twelve. With `rescale` they become four times
    and twice as fine, as they are and half as fine, as in XCiT (El-Nouby et al. 2021, arXiv:2106.09681); without, they
    stay on its grid, as in SelfPatch's code for segmentation. `steps` are the pixels from cell to cell of each map.
    Raises UserError for a backbone without grids."""

    def __init__(self, backbone: Backbone, taps: Sequence[int], *, rescale: bool) -> None:
        super().__init__()
        self.backbone = backbone
        shapes = [x.shape for x in sample(backbone)]
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
            parts = [LayerNorm2d(dim) for dim in self.dims]  # of tokens that no norm has seen yet, as Swin's code has
        self.scale = nn.ModuleList(parts)

    def forward(self, images: Tensor) -> list[Tensor]:
        _, grids = self.backbone.grids(images, every=True)
        return [scale(grids[tap]) for scale, tap in zip(self.scale, self.taps, strict=True)]


def rescalers(dims: Sequence[int]) -> list[nn.Module]:
    """From the grid of a ViT to one four times as fine, twice as fine, as it is, and half as fine."""
    a, b, _, _ = dims
    up = nn.ConvTranspose2d(a, a, 2, 2), nn.BatchNorm2d(a), nn.GELU(), nn.ConvTranspose2d(a, a, 2, 2)
    return [nn.Sequential(*up), nn.ConvTranspose2d(b, b, 2, 2), nn.Identity(), nn.MaxPool2d(2)]


@torch.no_grad()
@evaluating
def sample(backbone: Backbone) -> list[Tensor]:
    """What each stage or block gives for an empty image. Raises UserError."""
    with trying(backbone, f"gives no maps of {SIZE} x {SIZE} pixels"):
        found = backbone.grids(torch.zeros(1, 3, SIZE, SIZE, device=next(backbone.parameters()).device), every=True)[1]
        if len(found) < 2 or any(x.ndim != 4 for x in found):
            raise ValueError(f"{len(found)} outputs")
    return found
