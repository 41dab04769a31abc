"""CvT-13, a vision transformer with convolutions (Wu et al. 2021, arXiv:2103.15808), in the form that DRLoc trains.

CvT's own code was not released at that time (Liu et al. 2021, arXiv:2106.03746, appendix), so DRLoc's numbers come from
a third party's version. It has no class token and no norm after the last stage, and it pools by the mean of the grid.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from eagleray.models.pyramid import Pyramid, classifier, drop_rates

default_cfgs = generate_default_cfgs({"cvt_13": {}})


class CvT(Pyramid):
    """A CvT of several stages; each list has one entry per stage. B images, D channels, a grid of h x w tokens."""

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        dims: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        heads: Sequence[int] = (1, 3, 6),
        kernels: Sequence[int] = (7, 3, 3),  # kernel sizes of the token embedding
        strides: Sequence[int] = (4, 2, 2),
        head_dim: int = 64,
        mlp_ratio: int = 4,
        projection_kernel: int = 3,
        kv_stride: int = 2,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.dims, self.num_features = dims, dims[-1]
        rates = drop_rates(drop_path_rate, depths)
        stages = []
        for i, (before, dim) in enumerate(itertools.pairwise((3, *dims))):
            embed = nn.Conv2d(before, dim, kernels[i], strides[i], padding=kernels[i] // 2)
            blocks = (
                Block(dim, Attention(dim, heads[i], head_dim, projection_kernel, kv_stride), dim * mlp_ratio, rate)
                for rate in rates[i]
            )
            stages.append(nn.Sequential(embed, ChannelNorm(dim), *blocks))
        self.stages = nn.Sequential(*stages)
        self.head = classifier(dims[-1], num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last tokens (B, h, w, D) of images (B, 3, H, W)."""
        out: Tensor = self.stages(x)
        return out.permute(0, 2, 3, 1)


class Block(nn.Module):
    """A transformer block with norms before the attention and before the MLP, which is two 1 x 1 convolutions."""

    def __init__(self, dim: int, attention: nn.Module, hidden: int, drop_path: float) -> None:
        super().__init__()
        mlp = nn.Sequential(nn.Conv2d(dim, hidden, 1), nn.GELU(), nn.Conv2d(hidden, dim, 1))
        self.attention = nn.Sequential(ChannelNorm(dim), attention, DropPath(drop_path))
        self.mlp = nn.Sequential(ChannelNorm(dim), mlp, DropPath(drop_path))

    def forward(self, x: Tensor) -> Tensor:
        """Update the tokens x (B, D, h, w)."""
        x = x + self.attention(x)
        return x + self.mlp(x)


class Attention(nn.Module):
    """Attention of every token to a coarser grid. Queries, keys and values are computed by convolutions."""

    def __init__(self, dim: int, heads: int, head_dim: int, kernel: int, kv_stride: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = projection(dim, heads * head_dim, kernel, stride=1)
        self.kv = projection(dim, 2 * heads * head_dim, kernel, stride=kv_stride)
        self.out = nn.Conv2d(heads * head_dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention's output (B, D, h, w) for tokens x (B, D, h, w)."""
        q, (k, v) = self.q(x), self.kv(x).chunk(2, dim=1)
        q, k, v = (t.unflatten(1, (self.heads, -1)).flatten(3).mT for t in (q, k, v))  # (B, heads, tokens, head_dim)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.mT.reshape(len(x), -1, *x.shape[2:]))


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each token that divides by std + 1e-5 instead of the usual sqrt(var + 1e-5)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, 1, 1))
        self.bias = nn.Parameter(torch.zeros(dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, D, h, w)."""
        std = x.var(1, correction=0, keepdim=True).sqrt()
        return (x - x.mean(1, keepdim=True)) / (std + 1e-5) * self.weight + self.bias


def projection(dim: int, out: int, kernel: int, stride: int) -> nn.Sequential:
    """Build a convolutional projection: a depth-wise convolution, batch norm, and a 1 x 1 convolution."""
    grid = nn.Conv2d(dim, dim, kernel, stride, padding=kernel // 2, groups=dim, bias=False)
    return nn.Sequential(grid, nn.BatchNorm2d(dim), nn.Conv2d(dim, out, 1, bias=False))


@register_model
def cvt_13(pretrained: bool = False, **options: Any) -> nn.Module:
    return build_model_with_cfg(CvT, "cvt_13", pretrained, kwargs_filter=("in_chans",), **options)
