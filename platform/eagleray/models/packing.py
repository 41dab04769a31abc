"""One forward of a vision transformer for crops of several sizes, whose tokens lie end to end in one sequence.

All layers but the attention treat tokens one by one, so they run once; the attention runs once for each size. DINOv2
trains with packed sequences too (Oquab et al. 2023, arXiv:2304.07193, section 5). T tokens in all, D channels.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn


def packable(model: Any) -> bool:
    """Return whether `packed_features` computes what the model does; of timm's models, only plain ViTs."""
    if hasattr(model, "forward_sizes"):
        return bool(model.packs())
    return type(model) is VisionTransformer and all(map(_plain, model.blocks)) and even(drop_rates(model.blocks))


def _plain(block: nn.Module) -> bool:
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


def packed_features(model: Any, sizes: Sequence[Tensor]) -> list[Tensor]:
    """Return what the model's `forward_features` returns for each of the images (B, 3, S, S) of several sizes."""
    if hasattr(model, "forward_sizes"):
        return model.forward_sizes(sizes)  # type: ignore[no-any-return]
    tokens = [model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x)))) for x in sizes]
    shapes = [(x.shape[0], x.shape[1]) for x in tokens]  # (B, N)
    x = torch.cat([x.flatten(0, 1) for x in tokens])  # (T, D)
    drawn = drop_factors(drop_rates(model.blocks), sum(b for b, _ in shapes), x)
    for block, (keep1, keep2) in zip(model.blocks, of_tokens(drawn, shapes, len(model.blocks)), strict=True):
        x = add(x, block.ls1(_attend(block.attn, block.norm1(x), shapes)), keep1)
        x = add(x, block.ls2(block.mlp(block.norm2(x))), keep2)
    parts = model.norm(x).split([b * n for b, n in shapes])
    return [part.view(*shape, -1) for part, shape in zip(parts, shapes, strict=True)]


def add(x: Tensor, branch: Tensor, keep: Tensor | None) -> Tensor:
    """Return x plus a residual branch, both (T, D), of which drop path keeps some crops."""
    return x + branch if keep is None else torch.addcmul(x, branch, keep)


def _attend(attn: Any, x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Return the output (T, D) of an attention layer for tokens (T, D) of crops with `shapes` (B, N)."""
    out = []
    for part, (b, n) in zip(attn.qkv(x).split([b * n for b, n in shapes]), shapes, strict=True):
        q, k, v = part.view(b, n, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        out.append(y.transpose(1, 2).reshape(b * n, attn.attn_dim))
    projected: Tensor = attn.proj_drop(attn.proj(attn.norm(torch.cat(out))))
    return projected


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
    drawn: Tensor | None, shapes: Sequence[tuple[int, int]], blocks: int
) -> Sequence[Sequence[Tensor | None]]:
    """Return the factors (T, 1) of both branches of each block, alike for a crop's tokens; `shapes` are (B, N)."""
    if drawn is None:
        return [(None, None)] * blocks
    parts = drawn.flatten(0, 1).split([b for b, _ in shapes], 1)
    tokens = [part.repeat_interleave(n, 1) for part, (_, n) in zip(parts, shapes, strict=True)]
    each = torch.cat(tokens, 1).unsqueeze(2).unbind(0)
    return list(zip(each[::2], each[1::2], strict=True))
