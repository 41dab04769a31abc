"""A feature pyramid (Lin et al. 2017, arXiv:1612.03144) on any backbone, for detection. A ViT, all of whose blocks work
on one grid, gets its four scales as in XCiT (El-Nouby et al. 2021, arXiv:2106.09681), which SelfPatch follows."""

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from eagleray.errors import UserError
from eagleray.models.backbone import Backbone

TAPS = (4, 6, 8, 12)  # of 12: the blocks of a ViT that the four scales are read after
SIZE = 224  # pixels of the image that tells the strides


class FeaturePyramid(nn.Module):
    """Images (B, 3, H, W) to maps (B, channels, H / s, W / s) by name, one for each s of `strides`, the finest first;
    the last one, `pool`, is for proposals only. Raises UserError for a backbone that such maps cannot be made from."""

    def __init__(self, backbone: Backbone, channels: int = 256) -> None:
        super().__init__()
        self.backbone, self.out_channels = backbone, channels
        maps = sample(backbone)
        dims, steps = [x.shape[1] for x in maps], [SIZE / x.shape[3] for x in maps]
        self.taps = list(range(len(maps)))
        if len(maps) > 1 and len(set(steps)) == 1:
            self.taps = [max(len(maps) * tap // 12 - 1, 0) for tap in TAPS]
            dims = [dims[tap] for tap in self.taps]
            self.scale = nn.ModuleList(rescalers(dims))
            steps = [steps[0] / 4, steps[0] / 2, steps[0], steps[0] * 2]
        elif any(isinstance(m, nn.LayerNorm) for m in backbone.modules()):
            self.scale = nn.ModuleList(LayerNorm2d(dim) for dim in dims)  # as in Swin's detection code
        else:
            self.scale = nn.ModuleList(nn.Identity() for _ in dims)
        self.strides = strides(steps)
        self.names = [str(i) for i in range(len(dims))]  # what regions are cut from
        self.fpn = FeaturePyramidNetwork(dims, channels, extra_blocks=LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        _, maps = self.backbone.grids(images, every=True)
        scaled = [scale(maps[tap]) for scale, tap in zip(self.scale, self.taps, strict=True)]
        out: dict[str, Tensor] = self.fpn(dict(zip(self.names, scaled, strict=True)))
        return out


def rescalers(dims: list[int]) -> list[nn.Module]:
    """From the grid of a ViT to one four times as fine, twice as fine, as it is, and half as fine."""
    a, b, _, _ = dims
    up = nn.ConvTranspose2d(a, a, 2, 2), nn.BatchNorm2d(a), nn.GELU(), nn.ConvTranspose2d(a, a, 2, 2)
    return [nn.Sequential(*up), nn.ConvTranspose2d(b, b, 2, 2), nn.Identity(), nn.MaxPool2d(2)]


@torch.no_grad()
def sample(backbone: Backbone) -> list[Tensor]:
    """What the stages or blocks give for an empty image. Raises UserError."""
    device, training = next(backbone.parameters()).device, backbone.training
    backbone.eval()
    try:
        return backbone.grids(torch.zeros(1, 3, SIZE, SIZE, device=device), every=True)[1]
    except UserError:
        raise
    except Exception as e:  # models refuse a size, or an output that is no grid, in many ways
        kind, why = type(backbone.model).__name__, " ".join(str(e).split())
        raise UserError(f"detection: {kind} gives no grids for {SIZE} x {SIZE} pixels: {why}") from None
    finally:
        backbone.train(training)


def strides(steps: list[float]) -> list[int]:
    """Pixels from cell to cell of each map, and of `pool`. Raises UserError where anchors and regions would not lie on
    the cells."""
    if any(step < 1 or step != 2 ** (int(step).bit_length() - 1) for step in steps):
        raise UserError(
            f"detection: the backbone's grids are {', '.join(f'{s:g}' for s in steps)} pixels apart, expected powers of"
            " two, such as those of patches of 8, 16 or 32 pixels"
        )
    return [int(step) for step in (*steps, 2 * steps[-1])]
