"""ViL, a multi-scale vision longformer (Zhang et al. 2021, arXiv:2103.15358), in the form that EsViT trains.

That form has four stages and relative positions (Li et al. 2022, arXiv:2106.09785, table 6)."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from eagleray.models.pyramid import Pyramid, classifier, drop_rates, init

# There are no weights to load, but timm warns about a model that has no entry here.
default_cfgs = generate_default_cfgs({"vil_tiny": {}})

Grid = tuple[int, int]  # rows and columns of patches


class ViL(Pyramid):
    """Four stages, each a patch embedding and transformer blocks.

    Tokens are (B, G + N, C): the G global tokens of the stage, then its N = h * w patches, row-major, with C channels.
    The relative positions of full attention are made for `img_size`, and resampled for images of another size."""

    stage_fmt = "NHWC"

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = 0,
        patches: Sequence[int] = (4, 2, 2, 2),
        dims: Sequence[int] = (96, 192, 384, 768),
        depths: Sequence[int] = (2, 2, 6, 2),
        # Table 6 has (3, 3, 6, 12); the paper's text and the released recipe have 32 channels per head.
        heads: Sequence[int] = (3, 6, 12, 24),
        tokens: Sequence[int] = (1, 1, 1, 0),  # global tokens per stage; the last stage averages its patches
        # None: full attention. Table 6 has windows in all four stages, the released recipe in two.
        windows: Sequence[int | None] = (7, 7, None, None),
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if tokens[-1]:
            raise ValueError(f"tokens={list(tokens)}: the last stage is averaged, so it has no global tokens")
        drop = drop_rates(drop_path_rate, depths)
        grid = to_2tuple(img_size)
        stages = []
        for i, (before, dim) in enumerate(itertools.pairwise([in_chans, *dims])):
            grid = (grid[0] // patches[i], grid[1] // patches[i])
            attentions = [attention(dim, heads[i], tokens[i], grid, windows[i]) for _ in range(depths[i])]
            blocks = [Block(dim, attn, rate) for attn, rate in zip(attentions, drop[i], strict=True)]
            stages.append(Stage(before, dim, patches[i], tokens[i], blocks))
        self.stages = nn.Sequential(*stages)
        self.dims, self.num_features = dims, dims[-1]
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = classifier(dims[-1], num_classes)
        self.apply(init)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last tokens (B, h, w, C) of images (B, 3, H, W)."""
        return self.norm(self.stages(x.permute(0, 2, 3, 1)))


class Stage(nn.Module):
    """A patch embedding, then blocks on the patches and on global tokens, which only this stage uses."""

    def __init__(self, before: int, dim: int, patch: int, tokens: int, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(before, dim, patch, patch), nn.LayerNorm(dim, eps=1e-6)
        self.tokens = parameter(1, tokens, dim) if tokens else None
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Turn the tokens of the previous stage, or the image, (B, H, W, before) into tokens (B, h, w, dim)."""
        x = self.embed(x.permute(0, 3, 1, 2))
        grid = x.shape[2:]
        x = self.norm(x.flatten(2).mT)  # (B, N, C)
        if self.tokens is not None:
            x = torch.cat([self.tokens.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x, grid)
        return x[:, -grid.numel() :].unflatten(1, grid)


class Block(nn.Module):
    """A transformer block on tokens (B, G + N, C), with norms before the attention and before the MLP."""

    def __init__(self, dim: int, attn: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), attn
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, 4 * dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Attention(nn.Module):
    """Multi-head attention with a learned bias on the score of each query and key; H heads.

    The bias between two patches depends on their offset. Each global token has biases of its own."""

    index: Tensor  # rows of the bias table, by query and key

    def __init__(self, dim: int, heads: int, tokens: int, reach: Grid) -> None:
        """Create the layers and the bias table, for patches fewer than `reach` rows and columns apart."""
        super().__init__()
        self.heads, self.tokens = heads, tokens
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = parameter((2 * reach[0] - 1) * (2 * reach[1] - 1), heads)
        if tokens:
            self.to_global, self.from_global = parameter(heads, tokens), parameter(heads, tokens)
            self.among_global = parameter(heads, tokens, tokens)

    def bias_from_global(self, patches: int) -> Tensor:
        """Return the bias (H, G, G + N) of global queries and all keys."""
        return torch.cat([self.among_global, self.from_global.unsqueeze(2).expand(-1, -1, patches)], 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attend from queries (B, ..., Q, C) to keys and values (B, ..., K, C), with a bias (..., H, Q, K)."""
        # Windows join the heads' axis, not the images': the bias, the same for all images, is then not copied.
        heads = [t.unflatten(-1, (self.heads, -1)).transpose(-2, -3).flatten(1, -3) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], bias.flatten(0, -3).unsqueeze(0))
        return out.unflatten(1, (*q.shape[1:-2], self.heads)).transpose(-2, -3).flatten(-2)


class FullAttention(Attention):
    """Attention of every token to every token."""

    def __init__(self, dim: int, heads: int, tokens: int, grid: Grid) -> None:
        super().__init__(dim, heads, tokens, grid)
        at = positions(*grid)
        self.register_buffer("index", offsets(at, at, grid), persistent=False)  # (N, N)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)  # (B, G + N, C)
        return self.proj(self.attend(q, k, v, self.bias(grid[0] * grid[1])))

    def bias(self, patches: int) -> Tensor:
        """Return the bias (H, G + N, G + N) for a grid of `patches` patches."""
        bias = self.table[self.index].permute(2, 0, 1)  # (H, N, N), N for images of `img_size`
        if patches != bias.shape[1]:
            # This treats the patches as one line, which mixes up rows, as the released model did with small crops.
            bias = F.interpolate(bias.unsqueeze(0), size=(patches, patches), mode="bicubic").squeeze(0)
        if self.tokens:
            to_global = self.to_global.unsqueeze(1).expand(-1, patches, -1)
            bias = torch.cat([self.bias_from_global(patches), torch.cat([to_global, bias], 2)], 1)
        return bias


class WindowAttention(Attention):
    """Attention of each patch to the global tokens, its own window of s x s patches and the 8 windows around it.

    In training, each call draws one of these 8 windows and ignores the others. A global token attends to all tokens."""

    def __init__(self, dim: int, heads: int, tokens: int, window: int) -> None:
        reach = (2 * window, 2 * window)
        super().__init__(dim, heads, tokens, reach)
        self.window = window
        at = positions(window, window)
        begin = (positions(3, 3) - 1) * window  # first token of each of 3 x 3 windows, relative to the middle one's
        index = [offsets(at, at + b, reach) for b in begin]
        self.register_buffer("index", torch.stack(index, 1), persistent=False)  # (s * s, 9, s * s)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        g, s = self.tokens, self.window
        near = [OWN, AROUND[int(torch.randint(8, (), device="cpu"))]] if self.training else list(range(9))
        q, k, v = self.qkv(x).chunk(3, -1)  # (B, G + N, C)
        seen = []  # keys and values, (B, m, n, G + 9 * s * s, C)
        for t in (k, v):
            patches = gather(cut(t[:, g:], grid, s), near)
            seen.append(torch.cat([t[:, None, None, :g].expand(*patches.shape[:3], -1, -1), patches], 3))
        out = join(self.attend(cut(q[:, g:], grid, s), seen[0], seen[1], self.bias(grid, near)), grid, s)
        if g:
            out = torch.cat([self.attend(q[:, :g], k, v, self.bias_from_global(out.shape[1])), out], 1)
        return self.proj(out)

    def bias(self, grid: Grid, near: list[int]) -> Tensor:
        """Return the bias (m, n, H, s * s, G + 9 * s * s) of m x n windows: minus infinity outside the image.

        In shapes, 9 stands for the number of windows in `near`, whose patches are the keys."""
        bias = self.table[torch.cat([self.index[:, i] for i in near], 1)].permute(2, 0, 1)  # (H, s * s, 9 * s * s)
        inside = torch.ones(1, grid[0] * grid[1], 1, device=bias.device)
        inside = gather(cut(inside, grid, self.window), near).squeeze(0).mT  # (m, n, 1, 9 * s * s)
        bias = bias.masked_fill(inside.unsqueeze(2) == 0, -torch.inf)
        if self.tokens:
            bias = torch.cat([self.to_global.unsqueeze(1).expand(*bias.shape[:-1], -1), bias], -1)
        return bias


OWN, AROUND = 4, (0, 1, 2, 3, 5, 6, 7, 8)  # row-major indices of 3 x 3 windows


def cut(x: Tensor, grid: Grid, s: int) -> Tensor:
    """Cut patches (B, N, C) into windows (B, m, n, s * s, C); zeros fill the last windows at the bottom and right."""
    x = F.pad(x.unflatten(1, grid), (0, 0, 0, -grid[1] % s, 0, -grid[0] % s))
    return x.unflatten(2, (-1, s)).unflatten(1, (-1, s)).transpose(2, 3).flatten(3, 4)


def join(x: Tensor, grid: Grid, s: int) -> Tensor:
    """Join windows (B, m, n, s * s, C) to patches (B, N, C), without the zeros that `cut` added."""
    x = x.unflatten(3, (s, s)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return x[:, : grid[0], : grid[1]].flatten(1, 2)


def gather(x: Tensor, near: list[int]) -> Tensor:
    """Collect the windows around each of the windows x (B, m, n, L, C), joined to (B, m, n, len(near) * L, C).

    `near` are row-major indices into the 3 x 3 windows around a window; index 4 is the window itself."""
    m, n = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, 0, 1, 1, 1, 1))
    return torch.cat([x[:, i : i + m, j : j + n] for i, j in (divmod(at, 3) for at in near)], 3)


def positions(h: int, w: int) -> Tensor:
    """Return the row and the column (h * w, 2) of each patch of a grid."""
    return torch.cartesian_prod(torch.arange(h), torch.arange(w))


def offsets(q: Tensor, k: Tensor, reach: Grid) -> Tensor:
    """Return the rows (Q, K) of the bias table for queries at positions q (Q, 2) and keys at positions k (K, 2)."""
    rows, columns = (q.unsqueeze(1) - k + torch.tensor(reach) - 1).unbind(-1)
    return rows * (2 * reach[1] - 1) + columns


def attention(dim: int, heads: int, tokens: int, grid: Grid, window: int | None) -> Attention:
    """Create attention in windows of `window` x `window` patches, or full attention for None."""
    if window is None:
        return FullAttention(dim, heads, tokens, grid)
    return WindowAttention(dim, heads, tokens, window)


def parameter(*shape: int) -> nn.Parameter:
    """Create a parameter of this shape from a truncated normal distribution with std 0.02."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))


@register_model
def vil_tiny(pretrained: bool = False, **options: Any) -> ViL:
    return build_model_with_cfg(ViL, "vil_tiny", pretrained, **options)
