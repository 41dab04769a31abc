"""CvT, a vision transformer with convolutions (Wu et al. 2021, arXiv:2103.15808), in the form that EsViT trains.

That form has four stages and attention in windows (Li et al. 2022, arXiv:2106.09785, table 6)."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm2d
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from eagleray.models.pyramid import Pyramid, classifier, drop_rates

# There are no weights to load, but timm warns about a model that has no entry here.
default_cfgs = generate_default_cfgs({"cvt_tiny_esvit": {}})


class CvT(Pyramid):
    """Four stages of a convolution, which shrinks the grid, and blocks of attention in windows.

    The first stage divides the sides of the grid by 4, each later one by 2. Tokens are (B, C, h, w): B images, C
    channels. There are no position embeddings: the paper's text has relative ones, the released model has none."""

    def __init__(
        self,
        *,
        in_chans: int = 3,
        num_classes: int = 0,
        dims: Sequence[int] = (64, 192, 384, 768),
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (1, 3, 6, 12),
        mlp_ratios: Sequence[float] = (4, 4, 4, 4),
        windows: Sequence[int] = (7, 7, 7, 7),
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        drop = drop_rates(drop_path_rate, depths)
        stages = []
        for i, (before, dim) in enumerate(itertools.pairwise([in_chans, *dims])):
            embed = nn.Conv2d(before, dim, 3, 2, 1) if i else nn.Conv2d(before, dim, 7, 4, 2)
            blocks = [Block(dim, heads[i], mlp_ratios[i], windows[i], rate) for rate in drop[i]]
            stages.append(nn.Sequential(embed, LayerNorm2d(dim, eps=1e-5), *blocks))
        self.stages = nn.Sequential(*stages)
        self.dims, self.num_features = dims, dims[-1]
        self.norm = nn.LayerNorm(dims[-1], eps=1e-5)
        self.head = classifier(dims[-1], num_classes)
        self.apply(init)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last tokens (B, h, w, C) of images (B, 3, H, W)."""
        return self.norm(self.stages(x).permute(0, 2, 3, 1))


class Block(nn.Module):
    """A transformer block on tokens (B, C, h, w), with norms before the attention and before the MLP."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float, window: int, drop_path: float) -> None:
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.norm1, self.attn = LayerNorm2d(dim, eps=1e-5), WindowAttention(dim, heads, window)
        self.norm2 = LayerNorm2d(dim, eps=1e-5)
        self.mlp = nn.Sequential(nn.Conv2d(dim, hidden, 1), QuickGELU(), nn.Conv2d(hidden, dim, 1))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class WindowAttention(nn.Module):
    """Attention within windows of s x s tokens, on tokens (B, C, h, w).

    A 3 x 3 convolution comes before the queries, keys and values, and it crosses the borders of windows."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1, groups=dim, bias=False), nn.BatchNorm2d(dim), nn.Conv2d(dim, 3 * dim, 1)
        )
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        s = min(self.window, h, w)
        # The padding comes before the convolution and is not masked, so the convolution's output on it is attended to.
        x = F.pad(x, (0, -w % s, 0, -h % s))
        m, n = x.shape[2] // s, x.shape[3] // s
        qkv = self.qkv(x).view(b, 3, self.heads, -1, m, s, n, s).permute(1, 0, 4, 6, 2, 5, 7, 3)
        q, k, v = qkv.reshape(3, b * m * n, self.heads, s * s, -1)
        out = F.scaled_dot_product_attention(q, k, v, scale=c**-0.5)  # c is for all heads, as in the released code
        out = out.view(b, m, n, self.heads, s, s, -1).permute(0, 3, 6, 1, 4, 2, 5).reshape(x.shape)
        return self.proj(out[:, :, :h, :w])


class QuickGELU(nn.Module):
    """GELU, approximated by x * sigmoid(1.702 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def init(module: nn.Module) -> None:
    """Initialise a convolution or linear layer: truncated normal weights with std 0.02, zero biases."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@register_model
def cvt_tiny_esvit(pretrained: bool = False, **options: Any) -> CvT:
    return build_model_with_cfg(CvT, "cvt_tiny_esvit", pretrained, **options)
