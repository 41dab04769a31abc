"""Swin transformers that pad the grid before they shift it, as EsViT does; timm shifts first.

Swin: Liu et al. 2021, arXiv:2103.14030; EsViT: Li et al. 2022, arXiv:2106.09785, appendix A. The weights have the same
names and shapes as timm's. Where whole windows fill the grid of every shifted block, the outputs too are timm's, up to
the epsilon of the layer norms. That is so for images of 224 pixels, but not of 96."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, checkpoint_filter_fn, window_partition
from torch import Tensor, nn

from eagleray.base.autocast import product_dtype
from eagleray.models.tokens import add, drop_factors, drop_rates, even, joined, of_tokens

TINY = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
SMALL = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}
BASE = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}

# There are no weights to load, but timm warns about a model that has no entry here.
default_cfgs = generate_default_cfgs({f"esvit_swin_{s}_w{w}": {} for s in ("tiny", "small", "base") for w in (7, 14)})


Grid = tuple[int, int, int] | torch.Size  # B crops of h x w tokens


class Windows(NamedTuple):
    """The layout of a grid's n tokens and of padding in a block's W windows of N positions; P = W * N."""

    take: Tensor  # (P,) index of the token at each position of the windows, n for padding
    back: Tensor  # (n,) position of each token
    mask: Tensor | None  # (W, N, N) summand of the scores; None: all tokens of a window see each other


class PadFirst(SwinTransformerBlock):
    """A Swin block that pads the grid at the bottom and the right to whole windows, before any shift.

    The padding is not masked: padding tokens take part in the attention of their region of the shifted grid. Padding,
    shift and windows together are one reordering of the tokens, computed once for each grid. B images, a grid of h x w
    tokens, C channels."""

    layouts: dict[tuple[Any, ...], Windows]  # a cache that all blocks of a model share

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output (B, h, w, C) for tokens x (B, h, w, C)."""
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        tokens = self.norm2(x).flatten(0, 2)
        return x + self.drop_path2(self.mlp(tokens).view_as(x))

    def forward_sizes(self, x: Tensor, shapes: Sequence[Grid], keep: Sequence[Tensor | None]) -> Tensor:
        """Return the block's output (T, C) for the tokens x (T, C) of crops of several sizes.

        `shapes` are (B, h, w) of each size, `keep` drop path's factors (T, 1) for each of the two branches."""
        x = add(x, self._attn_sizes(self.norm1(x), shapes), keep[0])
        return add(x, self.mlp(self.norm2(x)), keep[1])

    def _attn(self, x: Tensor) -> Tensor:
        """Return the attention's output (B, h, w, C) for tokens x (B, h, w, C)."""
        take, back, mask = self._layout(x.shape[1], x.shape[2], x.device)
        x = x.to(product_dtype(x))  # autocast's dtype before `reorder`, which then moves half the bytes
        within = reorder(x.flatten(1, 2), take, back)
        out = self.attn(within.view(-1, self.window_area, x.shape[3]), mask)
        return reorder(out.view(len(x), len(take), -1), back, take).view_as(x)

    def _attn_sizes(self, x: Tensor, shapes: Sequence[Grid]) -> Tensor:
        """Return the attention's output (T, C) for the tokens x (T, C) of crops of several sizes."""
        # Each size is computed alone: joining the sizes' tokens and gradients would take longer than it saves.
        parts = x.to(product_dtype(x)).split([b * h * w for b, h, w in shapes])
        outs = [self._attn(part.view(*shape, -1)) for part, shape in zip(parts, shapes, strict=True)]
        return joined([out.flatten(0, 2) for out in outs])

    def _layout(self, h: int, w: int, device: torch.device) -> Windows:
        """Return the Windows of a grid of h x w tokens, computed only once."""
        key = (self.window_size, self.shift_size, h, w, device)
        if key not in self.layouts:
            self.layouts[key] = self._windows(h, w, device)
        return self.layouts[key]

    @torch.no_grad()
    def _windows(self, h: int, w: int, device: torch.device) -> Windows:
        wh, ww = self.window_size
        n = torch.arange(h * w, device=device).view(h, w)
        grid = F.pad(n, (0, -w % ww, 0, -h % wh), value=h * w)
        shifted = grid.roll((-self.shift_size[0], -self.shift_size[1]), (0, 1))
        take = window_partition(shifted.view(1, *grid.shape, 1), self.window_size).flatten()
        mask = self.get_attn_mask(grid.view(1, *grid.shape, 1).float())
        return Windows(take, take.argsort(stable=True)[: h * w], mask)


class WindowAttention(timm.models.swin_transformer.WindowAttention):  # type: ignore[misc]
    """timm's attention within windows. Scores are not stored if the device's fused attention kernel takes a mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output (W, N, C) for tokens of windows (W, N, C); `mask` (V, N, N) repeats for every V windows."""
        # Parts are unbound before the heads are moved, as in tokens.by_head.
        each = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in each)  # (W, heads, N, d)
        bias = self._get_rel_pos_bias()  # (1, heads, N, N)
        if mask is None:
            bias = bias.to(q.dtype)
        else:
            bias = (bias + mask.unsqueeze(1)).to(q.dtype).repeat(len(x) // len(mask), 1, 1, 1)
        drop = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, bias, drop, scale=self.scale)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        padded = F.pad(x, (0, 0, 0, 1)) if len(take) > x.shape[1] else x
        return padded.index_select(1, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reorder(grads[0], ctx.back, ctx.back), None, None


def reorder(x: Tensor, take: Tensor, back: Tensor) -> Tensor:
    """Return the tokens of x (B, n, C) in the order `take`, in which n stands for a token of zeros.

    `back` is the inverse order. The gradient is gathered too, as adding it up would have no fixed order on a GPU."""
    return _Reorder.apply(x, take, back)  # type: ignore[no-any-return]


class EsViTSwin(SwinTransformer):
    """timm's Swin transformer with `PadFirst` blocks, for images of any size.

    If the grid of a stage fits into one window for images of `img_size`, this stage never shifts its window, whatever
    the size of later images. The smaller grid of a smaller image is padded to the window."""

    def __init__(self, **options: Any) -> None:
        norm = partial(nn.LayerNorm, eps=1e-6)
        super().__init__(**{"strict_img_size": False, "norm_layer": norm, "drop_path_rate": 0.0, **options})
        layouts: dict[tuple[Any, ...], Windows] = {}
        for block in self.modules():
            if isinstance(block, SwinTransformerBlock):
                block.__class__ = PadFirst  # only `forward` changes
                block.attn.__class__ = WindowAttention
                block.layouts = layouts  # type: ignore[assignment]

    def fill_layouts(self, images: Sequence[Tensor]) -> None:
        """Compute the positions of tokens in the windows of every block, for images (B, 3, H, W) of several sizes."""
        embed: Any = self.patch_embed
        layers: Any = self.layers
        for x in images:
            h, w = embed.dynamic_feat_size(x.shape[2:])
            for stage in layers:
                if not isinstance(stage.downsample, nn.Identity):
                    h, w = -(-h // 2), -(-w // 2)
                for block in stage.blocks:
                    block._layout(h, w, x.device)

    def packs(self) -> bool:
        """Return whether `forward_sizes` computes what `forward_features` does: not if blocks or drop path changed."""
        blocks = self._blocks()
        changed = any("forward" in vars(b) or b._forward_hooks or b._forward_pre_hooks for b in blocks)
        return not changed and even(drop_rates(blocks))

    def _blocks(self) -> list[Any]:
        layers: Any = self.layers
        return [block for stage in layers for block in stage.blocks]

    def forward_sizes(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Return the output (B, h, w, C) for images (B, 3, H, W) of each of several sizes, in one forward pass.

        Layers that treat tokens one by one run once on the tokens of all sizes, which lie end to end."""
        parts = [self.patch_embed(x) for x in images]
        drawn, done = drop_factors(drop_rates(self._blocks()), sum(map(len, images)), parts[0]), 0
        stage: Any
        for stage in self.layers:
            parts = [stage.downsample(part) for part in parts]
            shapes = [part.shape[:3] for part in parts]
            x, n = joined([part.flatten(0, 2) for part in parts]), len(stage.blocks)
            own = None if drawn is None else drawn[done : done + n]
            for block, keep in zip(stage.blocks, of_tokens(own, [(b, h * w) for b, h, w in shapes], n), strict=True):
                x = block.forward_sizes(x, shapes, keep)
            parts = [y.view(*s, -1) for y, s in zip(x.split([s.numel() for s in shapes]), shapes, strict=True)]
            done += n
        return [self.norm(part) for part in parts]


def create(name: str, pretrained: bool, **options: Any) -> EsViTSwin:
    """Build a model through timm, which also renames the authors' weights."""
    model: EsViTSwin = build_model_with_cfg(
        EsViTSwin, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, **options
    )
    return model


@register_model
def esvit_swin_tiny_w7(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_tiny_w7", pretrained, **TINY | {"window_size": 7} | options)


@register_model
def esvit_swin_tiny_w14(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_tiny_w14", pretrained, **TINY | {"window_size": 14} | options)


@register_model
def esvit_swin_small_w7(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_small_w7", pretrained, **SMALL | {"window_size": 7} | options)


@register_model
def esvit_swin_small_w14(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_small_w14", pretrained, **SMALL | {"window_size": 14} | options)


@register_model
def esvit_swin_base_w7(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_base_w7", pretrained, **BASE | {"window_size": 7} | options)


@register_model
def esvit_swin_base_w14(pretrained: bool = False, **options: Any) -> EsViTSwin:
    return create("esvit_swin_base_w14", pretrained, **BASE | {"window_size": 14} | options)
