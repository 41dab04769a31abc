"""The stem of wide ResNets as in SimCLR, BYOL and SwAV, where it is widened as their stages are.

timm's ResNets take the widths of their stages as `channels`, but keep a stem of 64 channels.
"""

from typing import Any

from timm.models.resnet import Bottleneck, ResNet
from torch import nn

from eagleray.base.errors import UserError


def widen_stem(model: Any, name: str) -> None:
    """Give a ResNet a stem of as many channels as its first stage has between its 1x1 convolutions, in place.

    Raises UserError for a model other than a ResNet of bottleneck blocks whose stem is one convolution.
    """
    if not has_plain_stem(model):
        raise UserError(f"backbone.stem=wide: {name} is no ResNet of bottleneck blocks after one convolution")
    first = model.layer1[0]
    width = first.conv1.out_channels
    model.conv1, model.bn1 = convolution(model.conv1, outputs=width), type(model.bn1)(width)
    first.conv1 = convolution(first.conv1, inputs=width)
    first.downsample[0] = convolution(first.downsample[0], inputs=width)
    model.feature_info[0]["num_chs"] = width


def has_plain_stem(model: Any) -> bool:
    """Return whether a model is a ResNet of bottleneck blocks after one convolution."""
    blocks: Any = getattr(model, "layer1", None)
    return isinstance(model, ResNet) and isinstance(blocks[0], Bottleneck) and isinstance(model.conv1, nn.Conv2d)


def convolution(old: nn.Conv2d, *, inputs: int | None = None, outputs: int | None = None) -> nn.Conv2d:
    """Return a convolution like `old` with other channels, initialised as timm's ResNets are."""
    new = nn.Conv2d(
        inputs or old.in_channels,
        outputs or old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        bias=False,
    )
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    return new
