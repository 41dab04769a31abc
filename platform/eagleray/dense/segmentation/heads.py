"""Define the heads that predict the class of every pixel from feature maps: Semantic FPN (Kirillov et al. 2019,
arXiv:1901.02446) and UPerNet (Xiao et al. 2018, arXiv:1807.10221).

Both follow mmsegmentation, with which the papers' results were computed. Feature maps are (B, C, h, w), ordered from
the finest to the coarsest; K is the number of classes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork

DROPOUT = 0.1


def classify(inside: int, classes: int) -> nn.Module:
    """Build dropout followed by the last convolution, which predicts a score for each class."""
    last = nn.Conv2d(inside, classes, 1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)  # type: ignore[arg-type]
    return nn.Sequential(nn.Dropout2d(DROPOUT), last)


def resized(x: Tensor, like: Tensor) -> Tensor:
    """Resize a feature map x to the height and width of the map `like`."""
    return F.interpolate(x, like.shape[2:], mode="bilinear")


class SemanticFPN(nn.Module):
    """The head of Semantic FPN, on a feature pyramid with `width` channels.

    Level i >= 1 of the pyramid passes through i convolutions to half as many channels, each followed by an upsampling
    by 2. Level 0 passes through one convolution. The class scores are computed from the sum of all levels."""

    def __init__(self, dims: Sequence[int], classes: int, *, width: int = 256) -> None:
        super().__init__()
        narrow = width // 2
        self.fpn = FeaturePyramidNetwork(list(dims), width)
        self.levels = nn.ModuleList()
        for level in range(len(dims)):
            # Level 0 has one convolution and no upsampling.
            up = [nn.Upsample(scale_factor=2, mode="bilinear")] if level else []
            inside = [width] + [narrow] * max(level - 1, 0)
            self.levels.append(nn.Sequential(*(m for c in inside for m in (Conv2dNormActivation(c, narrow), *up))))
        self.classify = classify(narrow, classes)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return a list with one tensor: the class scores (B, K, h, w) at the size of the finest map."""
        pyramid = self.fpn({str(i): x for i, x in enumerate(maps)}).values()
        enlarged = [level(x) for level, x in zip(self.levels, pyramid, strict=True)]
        # Maps of equal size, as of a ViT, are enlarged, too, and then shrunk again, as in SelfPatch's code.
        return [self.classify(sum(resized(x, maps[0]) for x in enlarged))]


class UPerNet(nn.Module):
    """The head of UPerNet: pyramid pooling, a feature pyramid and, in training, an auxiliary classifier.

    Pyramid pooling averages the coarsest map over 1, 4, 9 and 36 parts of the image. The feature pyramid is built on
    the result, and the class scores are computed from all its levels, concatenated. The auxiliary classifier, of half
    the width, reads the second coarsest map."""

    def __init__(self, dims: Sequence[int], classes: int, *, width: int = 512) -> None:
        super().__init__()
        *fine, coarse = dims
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(parts), Conv2dNormActivation(coarse, width, 1)) for parts in (1, 2, 3, 6)
        )
        self.pooled = Conv2dNormActivation(coarse + 4 * width, width)
        self.lateral = nn.ModuleList(Conv2dNormActivation(c, width, 1) for c in fine)
        self.smooth = nn.ModuleList(Conv2dNormActivation(width, width) for _ in fine)
        self.fuse = nn.Sequential(Conv2dNormActivation(len(dims) * width, width), classify(width, classes))
        self.helper = nn.Sequential(Conv2dNormActivation(fine[-1], width // 2), classify(width // 2, classes))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return a list of class scores (B, K, h, w) at the size of the finest map.

        In training it has a second entry: the scores of the auxiliary classifier, at the size of the second coarsest
        map."""
        coarse = maps[-1]
        levels = [self.pooled(torch.cat([coarse, *(resized(pool(coarse), coarse) for pool in self.pools)], 1))]
        for lateral, x in zip(self.lateral[::-1], maps[-2::-1], strict=True):
            levels.append(lateral(x) + resized(levels[-1], x))
        smooth = [levels[0], *(s(x) for s, x in zip(self.smooth[::-1], levels[1:], strict=True))]
        out = self.fuse(torch.cat([resized(x, maps[0]) for x in smooth[::-1]], 1))
        return [out, self.helper(maps[-2])] if self.training else [out]
