"""The heads that predict the class of every pixel from a pyramid of maps: Semantic FPN (Kirillov et al. 2019,
arXiv:1901.02446) and UPerNet (Xiao et al. 2018, arXiv:1807.10221), as mmsegmentation has them, whose results the papers
print.

Maps are (B, C, h, w), the finest first; K classes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork

DROPOUT = 0.1


def conv(inside: int, outside: int, kernel: int = 3) -> nn.Module:
    """A convolution of stride 1, batch norm and ReLU."""
    return Conv2dNormActivation(inside, outside, kernel)


def classify(inside: int, classes: int) -> nn.Module:
    last = nn.Conv2d(inside, classes, 1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)  # type: ignore[arg-type]
    return nn.Sequential(nn.Dropout2d(DROPOUT), last)


def resized(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, like.shape[2:], mode="bilinear")


class SemanticFPN(nn.Module):
    """An FPN of `width` channels whose level i is doubled i times on its way to the finest map, with half as many, and
    the sum of them all."""

    def __init__(self, dims: Sequence[int], classes: int, *, width: int = 256) -> None:
        super().__init__()
        narrow = width // 2
        self.fpn = FeaturePyramidNetwork(list(dims), width)
        self.levels = nn.ModuleList()
        for level in range(len(dims)):
            # The first level has one convolution and is not enlarged.
            up = [nn.Upsample(scale_factor=2, mode="bilinear")] if level else []
            inside = [width] + [narrow] * max(level - 1, 0)
            self.levels.append(nn.Sequential(*(m for c in inside for m in (conv(c, narrow), *up))))
        self.classify = classify(narrow, classes)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Scores (B, K, h, w) of the finest map's size."""
        found = self.fpn({str(i): x for i, x in enumerate(maps)}).values()
        enlarged = [level(x) for level, x in zip(self.levels, found, strict=True)]
        # Maps of one size, those of a ViT as SelfPatch takes them, are enlarged like any others, and shrunk again.
        return [self.classify(sum(resized(x, maps[0]) for x in enlarged))]


class UPerNet(nn.Module):
    """Means of the coarsest map over 1, 4, 9 and 36 parts of the image, an FPN below them, and all its levels side by
    side. In training a second classifier, of half the width, reads the last map but one."""

    def __init__(self, dims: Sequence[int], classes: int, *, width: int = 512) -> None:
        super().__init__()
        *fine, coarse = dims
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(parts), conv(coarse, width, 1)) for parts in (1, 2, 3, 6)
        )
        self.pooled = conv(coarse + 4 * width, width)
        self.lateral = nn.ModuleList(conv(c, width, 1) for c in fine)
        self.smooth = nn.ModuleList(conv(width, width) for _ in fine)
        self.fuse = nn.Sequential(conv(len(dims) * width, width), classify(width, classes))
        self.helper = nn.Sequential(conv(fine[-1], width // 2), classify(width // 2, classes))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Scores (B, K, h, w) of the finest map's size, and in training those of the helper."""
        coarse = maps[-1]
        found = [self.pooled(torch.cat([coarse, *(resized(pool(coarse), coarse) for pool in self.pools)], 1))]
        for lateral, x in zip(self.lateral[::-1], maps[-2::-1], strict=True):
            found.append(lateral(x) + resized(found[-1], x))
        smooth = [found[0], *(s(x) for s, x in zip(self.smooth[::-1], found[1:], strict=True))]
        out = self.fuse(torch.cat([resized(x, maps[0]) for x in smooth[::-1]], 1))
        return [out, self.helper(maps[-2])] if self.training else [out]
