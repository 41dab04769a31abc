"""ResNet-18 for images of 32 pixels: a stem of one 3x3 convolution at full resolution, without pooling.

It is the network of published benchmarks on CIFAR, with the blocks of He et al. 2015, arXiv:1512.03385, table 1."""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

default_cfgs = generate_default_cfgs({"resnet18_32": {"first_conv": "conv1", "classifier": "fc"}})


class SmallResNet(ResNet):
    """A ResNet whose first stage has the resolution of the image."""

    def __init__(self, in_chans: int = 3, **options: Any) -> None:
        super().__init__(BasicBlock, in_chans=in_chans, **options)  # type: ignore[arg-type]
        stem = nn.Conv2d(in_chans, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
        self.conv1 = stem  # type: ignore[assignment]
        self.maxpool = nn.Identity()  # type: ignore[assignment]


@register_model
def resnet18_32(pretrained: bool = False, **options: Any) -> nn.Module:
    arguments: dict[str, Any] = {"layers": [2, 2, 2, 2], **options}
    return build_model_with_cfg(SmallResNet, "resnet18_32", pretrained, **arguments)
