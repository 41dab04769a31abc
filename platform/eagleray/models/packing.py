"""One forward of a vision transformer for crops of several sizes, whose tokens lie end to end in one sequence.

All layers but the attention treat tokens one by one, so they run once; the attention runs once for each size. DINOv2
trains with packed sequences too (Oquab et al. 2023, arXiv:2304.07193, section 5). T tokens in all, D channels.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn


class Hidden(NamedTuple):
    """Patches in whose place a token stands, and others in whose place another patch stands. A grid of h x w = N
    patches, D channels."""

    mask: Tensor  # (B, h, w) true for a patch that the token hides
    token: Tensor  # (1, D)
    source: Tensor | None = None  # (B, N) the patch of the image that stands at each position; None: its own


def take(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of each image in x (B, N, D) at positions (B, n), as (B, n, D)."""
    return x.gather(1, positions.unsqueeze(2).expand(-1, -1, x.shape[2]))


def maskable(model: Any) -> bool:
    """Return whether patches of a model can be hidden; of timm's models, those of plain ViTs that keep every patch."""
    return isinstance(model, VisionTransformer) and getattr(model.patch_drop, "prob", 0) == 0


def masked_features(model: Any, images: Tensor, hidden: Hidden) -> Tensor:
    """Return what the `forward_features` of a `maskable` model returns for images (B, 3, S, S) with hidden patches."""
    x = embedded(model, images, hidden)
    for block in model.blocks:
        x = block(x)
    out: Tensor = model.norm(x)
    return out


def packable(model: Any) -> bool:
    """Return whether `packed_features` computes what the model does; of timm's models, only plain ViTs."""
    if hasattr(model, "forward_sizes"):
        return bool(model.packs())
    return type(model) is VisionTransformer and all(map(plain, model.blocks)) and even(drop_rates(model.blocks))


def plain(block: nn.Module) -> bool:
    """Return whether a block is timm's own and nothing replaces or watches its layers."""
    return (
        type(block) is Block
        and type(block.attn) is Attention
        and block.attn.gate is None
        and block.attn.fused_attn
        and block.attn.attn_drop.p == 0
        and "forward" not in vars(block)
        and not any(m._forward_hooks or m._forward_pre_hooks for m in (block, block.attn))
        and not any(isinstance(m, nn.modules.batchnorm._NormBase) for m in block.modules())
    )


def packed_features(model: Any, sizes: Sequence[Tensor], hidden: Hidden | None = None) -> list[Tensor]:
    """Return what the model's `forward_features` returns for each of the images (B, 3, S, S) of several sizes.

    Patches of the images of the first size may be hidden."""
    if hasattr(model, "forward_sizes"):
        return model.forward_sizes(sizes)  # type: ignore[no-any-return]
    x, shapes = packed_tokens(model, sizes, hidden)
    factors = drop_factors(drop_rates(model.blocks), sum(b for b, _ in shapes), x)
    return unpacked(model.norm(packed_blocks(model.blocks, x, shapes, factors)), shapes)


def packed_tokens(
    model: Any, sizes: Sequence[Tensor], hidden: Hidden | None = None
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return what enters a ViT's blocks: the tokens (T, D) of images of several sizes, and the shape (B, N) of each."""
    tokens = [embedded(model, x, None if i else hidden) for i, x in enumerate(sizes)]
    return torch.cat([x.flatten(0, 1) for x in tokens]), [(x.shape[0], x.shape[1]) for x in tokens]


def embedded(model: Any, images: Tensor, hidden: Hidden | None = None) -> Tensor:
    """Return the tokens (B, N, D) of images (B, 3, S, S) that enter a ViT's first block. A hidden patch has a
    position; a patch that stands for another one has that one's."""
    patches = model.patch_embed(images)  # (B, h, w, D) or (B, h * w, D)
    if hidden is not None:
        if hidden.source is not None:
            patches = take(patches.flatten(1, -2), hidden.source).view_as(patches)
        mask = hidden.mask.reshape(patches.shape[:-1]).unsqueeze(-1)
        patches = torch.where(mask, hidden.token.to(patches.dtype), patches)
    tokens: Tensor = model.norm_pre(model.patch_drop(model._pos_embed(patches)))
    return tokens


def packed_blocks(
    blocks: Sequence[Any], x: Tensor, shapes: Sequence[tuple[int, int]], factors: Tensor | None
) -> Tensor:
    """Return the output (T, D) of blocks for tokens (T, D), with drop path's factors (blocks, 2, crops)."""
    for block, (keep1, keep2) in zip(blocks, of_tokens(factors, shapes, len(blocks)), strict=True):
        x = add(x, block.ls1(_attend(block.attn, block.norm1(x), shapes)), keep1)
        x = add(x, block.ls2(block.mlp(block.norm2(x))), keep2)
    return x


def unpacked(x: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the rows of x (T, C) apart, as (B, N, C) for each of the shapes (B, N)."""
    return [part.view(*shape, -1) for part, shape in zip(x.split([b * n for b, n in shapes]), shapes, strict=True)]


def add(x: Tensor, branch: Tensor, keep: Tensor | None) -> Tensor:
    """Return x plus a residual branch, both (T, D), of which drop path keeps some crops."""
    return x + branch if keep is None else torch.addcmul(x, branch, keep)


def _attend(attn: Any, x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Return the output (T, D) of an attention layer for tokens (T, D) of crops with `shapes` (B, N)."""
    out = []
    for part in unpacked(attn.qkv(x), shapes):
        q, k, v = by_head(part, 3, attn)
        y = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        out.append(y.transpose(1, 2).reshape(-1, attn.attn_dim))
    projected: Tensor = attn.proj_drop(attn.proj(attn.norm(torch.cat(out))))
    return projected


def by_head(x: Tensor, parts: int, attn: Any) -> tuple[Tensor, ...]:
    """Return the parts of x (B, N, parts * D), such as query, key and value, each as (B, H, N, D / H)."""
    # Unbound before the heads are moved: so the gradients of the parts are put together in one copy, instead of two.
    each = x.unflatten(2, (parts, attn.num_heads, attn.head_dim)).unbind(2)
    return tuple(part.transpose(1, 2) for part in each)


def drop_rates(blocks: Iterable[Any]) -> list[float]:
    """Return the probability with which drop path drops each branch, two for each block."""
    branches = [m for block in blocks for m in (block.drop_path1, block.drop_path2)]
    return [m.drop_prob if isinstance(m, DropPath) and m.training else 0.0 for m in branches]


def even(rates: Sequence[float]) -> bool:
    """Return whether the rates of the blocks rise evenly, as timm's do."""
    steps = max(len(rates) // 2 - 1, 1)
    line = [rates[0] + (rates[-1] - rates[0]) * (i // 2) / steps for i in range(len(rates))]
    return all(abs(a - b) < 1e-6 for a, b in zip(rates, line, strict=True))


def drop_factors(rates: Sequence[float], crops: int, like: Tensor) -> Tensor | None:
    """Draw the factors (blocks, 2, crops) of all branches together: 0 with the rate of a branch, else 1 / (1 - rate).

    `rates` are those of the branches, two for each block, and rise evenly. None stands for factors of 1.
    """
    if not any(rates):
        return None
    # Not a tensor of the rates: it would be copied from the host, which waits for that.
    keep = 1 - torch.linspace(rates[0], rates[-1], len(rates) // 2, device=like.device, dtype=like.dtype)
    keep = keep.view(-1, 1, 1)
    return torch.bernoulli(keep.expand(-1, 2, crops)) / keep


def of_tokens(
    factors: Tensor | None, shapes: Sequence[tuple[int, int]], blocks: int
) -> Sequence[Sequence[Tensor | None]]:
    """Return the factors (T, 1) of both branches of each block, alike for a crop's tokens; `shapes` are (B, N)."""
    if factors is None:
        return [(None, None)] * blocks
    parts = factors.flatten(0, 1).split([b for b, _ in shapes], 1)
    tokens = [part.repeat_interleave(n, 1) for part, (_, n) in zip(parts, shapes, strict=True)]
    each = torch.cat(tokens, 1).unsqueeze(2).unbind(0)
    return list(zip(each[::2], each[1::2], strict=True))
