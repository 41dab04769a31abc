"""ResNets with selective kernels as in SimCLR v2 (Chen et al. 2020, arXiv:2006.10029, section 3.1 and table 1).

Selective kernels (Li et al. 2019, arXiv:1903.06586) mix two streams of convolutions, channel by channel, with weights
that depend on the image. SimCLR v2's authors have two streams of 3x3 kernels instead of kernels of two sizes, each over
all input channels, and the stem and shortcuts of ResNet-D (He et al. 2018, arXiv:1812.01187). timm's `skresnet50`
divides the input between its streams, so it is another network."""

from typing import Any

import torch.nn.functional as F
from timm.layers import lecun_normal_
from timm.layers.selective_kernel import SelectiveKernelAttn
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

RATIO, LEAST = 16, 32  # a block's attention has channels / RATIO hidden channels, but at least LEAST

CFG = {"first_conv": "conv1.0", "classifier": "fc"}
default_cfgs = generate_default_cfgs({f"resnet{depth}_sk": CFG for depth in (50, 101, 152)})


class SKResNet(ResNet):
    """A ResNet-D whose 3x3 convolutions are selective kernels; all layers are `width` times a ResNet-50's width."""

    def __init__(self, *, width: int = 1, **options: Any) -> None:
        channels = [width * c for c in (64, 128, 256, 512)]
        stem = {"stem_type": "deep", "stem_width": width * 32}
        super().__init__(SKBottleneck, channels=channels, avg_down=True, **stem, **options)  # type: ignore[arg-type]
        # The padding is TensorFlow's: an even side is padded at its end alone.
        self.maxpool = nn.MaxPool2d(3, 2, ceil_mode=True)  # type: ignore[assignment]

    def init_weights(self, zero_init_last: bool = True) -> None:
        """Initialise convolutions after LeCun (variance 1 / inputs), as the authors' code does, and norms as timm."""
        super().init_weights(zero_init_last)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                lecun_normal_(module.weight)


class SKBottleneck(Bottleneck):
    """A bottleneck block with a selective kernel between its 1x1 convolutions."""

    def __init__(
        self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Sequential | None = None, **options: Any
    ) -> None:
        super().__init__(inplanes, planes, stride, downsample, **options)
        self.conv2 = SelectiveKernel(self.conv2)  # type: ignore[assignment]
        self.bn2, self.act2 = nn.Identity(), nn.Identity()  # type: ignore[assignment]  # `conv2` has its own
        if downsample is not None:
            downsample[0] = ShortcutPool(stride)


class SelectiveKernel(nn.Module):
    """Two convolutions like a given one, and the attention that mixes their outputs. B images, C channels."""

    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        inputs, channels = like.in_channels, like.out_channels
        size: dict[str, Any] = {"stride": like.stride, "padding": like.padding, "dilation": like.dilation}
        self.conv = nn.Conv2d(inputs, 2 * channels, 3, bias=False, **size)
        self.bn, self.act = nn.BatchNorm2d(2 * channels), nn.ReLU(inplace=True)
        self.attention = SelectiveKernelAttn(channels, 2, max(channels // RATIO, LEAST))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture V (B, C, h, w) of the streams' outputs for an input (B, C', H, W)."""
        u = self.act(self.bn(self.conv(x)))  # (B, 2 * C, h, w)
        weights = self.attention(u.unflatten(1, (2, -1))).to(u.dtype)  # (B, 2, C, 1, 1), sum to one over the streams
        u1, u2 = u.chunk(2, 1)
        return weights[:, 0] * u1 + weights[:, 1] * u2


class ShortcutPool(nn.Module):
    """The mean of 2x2 pixels before a shortcut's convolution, also where the shortcut keeps the resolution."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Average 2x2 pixels of (B, C, H, W) from the top left corner.

        With stride 2, a missing pixel at an end is a zero; with stride 1, it is left out of the mean."""
        if self.stride == 2:
            return F.avg_pool2d(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)), 2)
        return F.avg_pool2d(x, 2, 1, padding=1, count_include_pad=False)[:, :, 1:, 1:]


def build(name: str, pretrained: bool, layers: list[int], options: dict[str, Any]) -> nn.Module:
    """Return the model with `layers` blocks in its four stages."""
    arguments: dict[str, Any] = {"layers": layers, **options}
    return build_model_with_cfg(SKResNet, name, pretrained, **arguments)


@register_model
def resnet50_sk(pretrained: bool = False, **options: Any) -> nn.Module:
    return build("resnet50_sk", pretrained, [3, 4, 6, 3], options)


@register_model
def resnet101_sk(pretrained: bool = False, **options: Any) -> nn.Module:
    return build("resnet101_sk", pretrained, [3, 4, 23, 3], options)


@register_model
def resnet152_sk(pretrained: bool = False, **options: Any) -> nn.Module:
    return build("resnet152_sk", pretrained, [3, 8, 36, 3], options)
