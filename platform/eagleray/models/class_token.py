"""The last block of a vision transformer for its class token alone, which is all that a pooled vector reads of it.

Every token still gives a key and a value. The query, the projection and the MLP are those of the class token, so the
block costs a sixth. Outputs and gradients are those of the whole block, up to rounding. T tokens in all, D channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from eagleray.models.checkpointing import without_checkpoints
from eagleray.models.packing import (
    add,
    by_head,
    drop_factors,
    drop_rates,
    embedded,
    packable,
    packed_blocks,
    packed_tokens,
    plain,
    unpacked,
)


def class_token_pooled(model: Any) -> bool:
    """Return whether a model's pooled vector is the class token of a block that `class_tokens` computes."""
    return (
        type(model) is VisionTransformer
        and model.global_pool == "token"
        and model.attn_pool is None
        and model.cls_token is not None
        and not model.grad_checkpointing
        and len(model.blocks) > 0
        and without_checkpoints(plain, model.blocks[-1])
        and not any(isinstance(m, nn.Dropout) and m.p for m in model.blocks[-1].modules())
    )


def class_tokens(model: Any, sizes: Sequence[Tensor]) -> list[Tensor]:
    """Return the class tokens (B, 1, D) of what the model's `forward_features` returns for images (B, 3, S, S) of one
    size or, of a model that packs, of several."""
    *blocks, last = model.blocks
    if len(sizes) == 1 and (any(drop_rates(model.blocks)) or not packable(model)):  # drop path draws block by block
        x = embedded(model, sizes[0])
        for block in blocks:
            x = block(x)
        keeps = [_factors_of(m, x) for m in (last.drop_path1, last.drop_path2)]
        x, shapes = x.flatten(0, 1), [(x.shape[0], x.shape[1])]
    else:
        x, shapes = packed_tokens(model, sizes)
        factors = drop_factors(drop_rates(model.blocks), sum(b for b, _ in shapes), x)
        x = packed_blocks(blocks, x, shapes, None if factors is None else factors[:-1])
        keeps = [None, None] if factors is None else list(factors[-1].unsqueeze(2).unbind())
    out = model.norm(_last(last, x, shapes, *keeps))
    return [part.unsqueeze(1) for part in out.split([b for b, _ in shapes])]


def _factors_of(drop: nn.Module, x: Tensor) -> Tensor | None:
    """Draw the factors (B, 1) of a branch of tokens (B, N, D), with the random numbers that timm draws for them."""
    return drop(x.new_ones(len(x), 1)) if isinstance(drop, DropPath) and drop.drop_prob and drop.training else None


def _last(
    block: Any, x: Tensor, shapes: Sequence[tuple[int, int]], keep1: Tensor | None, keep2: Tensor | None
) -> Tensor:
    """Return the class tokens (crops, D) that a block makes of tokens (T, D) of crops with `shapes` (B, N)."""
    token = add(_first(x, shapes), block.ls1(_attend(block.attn, block.norm1(x), shapes)), keep1)
    return add(token, block.ls2(block.mlp(block.norm2(token))), keep2)


def _first(x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    return torch.cat([part[:, 0] for part in unpacked(x, shapes)])


def _attend(attn: Any, x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Return what the class tokens (crops, D) receive in an attention layer with tokens (T, D)."""
    rows = [attn.attn_dim, 2 * attn.attn_dim]
    w_q, w_kv = attn.qkv.weight.split(rows)
    b_q, b_kv = (None, None) if attn.qkv.bias is None else attn.qkv.bias.split(rows)
    q = F.linear(_first(x, shapes), w_q, b_q).unflatten(1, (1, attn.num_heads, attn.head_dim)).transpose(1, 2)
    out = []
    for mine, part in zip(q.split([b for b, _ in shapes]), unpacked(F.linear(x, w_kv, b_kv), shapes), strict=True):
        k, v = by_head(part, 2, attn)
        out.append(F.scaled_dot_product_attention(attn.q_norm(mine), attn.k_norm(k), v).flatten(1))
    projected: Tensor = attn.proj_drop(attn.proj(attn.norm(torch.cat(out))))
    return projected
