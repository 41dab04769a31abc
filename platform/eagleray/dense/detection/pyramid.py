"""Build a feature pyramid (Lin et al. 2017, arXiv:1612.03144) on any backbone, for detection."""

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from eagleray.base.errors import UserError
from eagleray.dense.feature_maps import Maps
from eagleray.models.backbone import Backbone

TAPS = (4, 6, 8, 12)  # blocks of a ViT of twelve whose outputs are read; scaled for other depths (SelfPatch)


class FeaturePyramid(nn.Module):
    """Map images (B, 3, H, W) to named feature maps (B, channels, H / s, W / s), finest first, for each s of `strides`.

    The last map, `pool`, is used for region proposals only. Raises UserError when the backbone has no feature maps from
    which a pyramid can be built."""

    def __init__(self, backbone: Backbone, channels: int = 256) -> None:
        super().__init__()
        self.maps, self.out_channels = Maps(backbone, TAPS, rescale=True), channels
        self.strides = strides(self.maps.steps)
        self.names = [str(i) for i in range(len(self.maps.dims))]  # names of the maps from which regions are cut
        self.fpn = FeaturePyramidNetwork(self.maps.dims, channels, extra_blocks=LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(dict(zip(self.names, self.maps(images), strict=True)))


def strides(steps: list[float]) -> list[int]:
    """Return the distance in pixels between neighbouring cells of each map, `steps`, and of the additional map `pool`.

    Raises UserError when a distance is not a power of two, as anchors and regions would not match the cells."""
    if any(step < 1 or step != 2 ** (int(step).bit_length() - 1) for step in steps):
        raise UserError(
            f"detection: the cells of the backbone's maps are {', '.join(f'{s:g}' for s in steps)} pixels apart; "
            "expected powers of two, as of a ViT with patches of 8, 16 or 32 pixels"
        )
    return [int(step) for step in (*steps, 2 * steps[-1])]
