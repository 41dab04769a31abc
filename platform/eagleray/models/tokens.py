"""Forward passes of a plain vision transformer that timm lacks: crops of several sizes at once, hidden and dropped
patches, and the last block for the class token alone.

Tokens of several sizes lie end to end in one sequence. All layers but the attention treat tokens one by one, so they
run once; the attention runs once for each size. DINOv2 trains with packed sequences too (Oquab et al. 2023,
arXiv:2304.07193, section 5). MAE's encoder sees some of the patches (He et al. 2021, arXiv:2111.06377).

If only the class token of the last block is needed, every token still gives a key and a value, but the query, the
projection and the MLP are computed for the class token alone. The block then costs a sixth; outputs and gradients are
those of the whole block, up to rounding.

B images, N patches, n of them kept, P prefix tokens, such as the class token, T tokens in all, D channels."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, DropPath, PatchDropout
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.models.checkpointing import without_checkpoints


class Hidden(NamedTuple):
    """The patches of B images that the mask token or other patches replace. A grid of h x w = N patches, D channels."""

    mask: Tensor  # (B, h, w) true for a patch that the mask token replaces
    token: Tensor  # (1, D) the mask token
    source: Tensor | None = None  # (B, N) index of the patch that is shown at each position; None: its own


def take(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of each image in x (B, N, D) at positions (B, n), as (B, n, D)."""
    return x.gather(1, positions.unsqueeze(2).expand(-1, -1, x.shape[2]))


def maskable(model: Any) -> bool:
    """Return whether patches of a model can be hidden: of timm's models, only plain ViTs that keep every patch."""
    return isinstance(model, VisionTransformer) and getattr(model.patch_drop, "prob", 0) == 0


def masked_features(model: Any, images: Tensor, hidden: Hidden) -> Tensor:
    """Return the output of the `forward_features` of a `maskable` model for images (B, 3, S, S) with hidden patches."""
    x = embedded(model, images, hidden)
    for block in model.blocks:
        x = block(x)
    return model.norm(x)


def packable(model: Any) -> bool:
    """Return whether `packed_features` supports a model; of timm's models, it supports only plain ViTs."""
    if hasattr(model, "forward_sizes"):
        return bool(model.packs())
    return type(model) is VisionTransformer and all(map(plain, model.blocks)) and even(drop_rates(model.blocks))


def plain(block: nn.Module) -> bool:
    """Return whether a block is timm's own, and none of its layers is replaced or watched by a hook."""
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
    """Return the output of the model's `forward_features` for images (B, 3, S, S) of each of several sizes.

    Patches of the images of the first size may be hidden."""
    if hasattr(model, "forward_sizes"):
        return model.forward_sizes(sizes)  # type: ignore[no-any-return]
    x, shapes = packed_tokens(model, sizes, hidden)
    factors = drop_factors(drop_rates(model.blocks), sum(b for b, _ in shapes), x)
    return unpacked(model.norm(packed_blocks(model.blocks, x, shapes, factors)), shapes)


def packed_tokens(
    model: Any, sizes: Sequence[Tensor], hidden: Hidden | None = None
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the input of a ViT's blocks, the tokens (T, D) of images of several sizes, and the shape (B, N) of each
    size."""
    tokens = [embedded(model, x, None if i else hidden) for i, x in enumerate(sizes)]
    return joined([x.flatten(0, 1) for x in tokens]), [(x.shape[0], x.shape[1]) for x in tokens]


def embedded(model: Any, images: Tensor, hidden: Hidden | None = None) -> Tensor:
    """Return the tokens (B, N, D) of images (B, 3, S, S) that enter a ViT's first block.

    The mask token, or a patch that replaces another one, gets the position of the patch that it replaces."""
    patches = model.patch_embed(images)  # (B, h, w, D) or (B, h * w, D)
    patches = patches if hidden is None else hide(patches, hidden)
    return model.norm_pre(model.patch_drop(model._pos_embed(patches)))


def hide(patches: Tensor, hidden: Hidden) -> Tensor:
    """Return patches (B, h, w, D) or (B, h * w, D) after both replacements of `hidden`: first each position shows the
    patch with the index `hidden.source`, then the mask token replaces the patches where `hidden.mask` is true."""
    if hidden.source is not None:
        patches = take(patches.flatten(1, -2), hidden.source).view_as(patches)
    mask = hidden.mask.reshape(patches.shape[:-1]).unsqueeze(-1)
    return torch.where(mask, hidden.token.to(patches.dtype), patches)


def packed_blocks(
    blocks: Sequence[Any], x: Tensor, shapes: Sequence[tuple[int, int]], factors: Tensor | None
) -> Tensor:
    """Return the output (T, D) of blocks for tokens (T, D). `factors` (blocks, 2, crops) are drop path's; None: 1."""
    for block, (keep1, keep2) in zip(blocks, of_tokens(factors, shapes, len(blocks)), strict=True):
        x = add(x, block.ls1(_attend(block.attn, block.norm1(x), shapes)), keep1)
        x = add(x, block.ls2(block.mlp(block.norm2(x))), keep2)
    return x


def unpacked(x: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Split the rows of x (T, C) by size, and return them as (B, N, C) for each of the shapes (B, N)."""
    return [part.view(*shape, -1) for part, shape in zip(x.split([b * n for b, n in shapes]), shapes, strict=True)]


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors along `dim`. A single tensor is returned as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def add(x: Tensor, branch: Tensor, keep: Tensor | None) -> Tensor:
    """Return x + keep * branch for x and a residual `branch` (T, D); `keep` (T, 1) are drop path's factors; None: 1."""
    return x + branch if keep is None else torch.addcmul(x, branch, keep)


def _attend(attn: Any, x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Return the output (T, D) of an attention layer for tokens (T, D) of crops with `shapes` (B, N)."""
    out = []
    for part in unpacked(attn.qkv(x), shapes):
        q, k, v = by_head(part, 3, attn)
        y = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
        out.append(y.transpose(1, 2).reshape(-1, attn.attn_dim))
    return attn.proj_drop(attn.proj(attn.norm(joined(out))))


def by_head(x: Tensor, parts: int, attn: Any) -> tuple[Tensor, ...]:
    """Split x (B, N, parts * D), such as query, key and value, into parts with heads (B, H, N, D / H)."""
    # Parts are unbound before the heads are moved, so that their gradients are joined in one copy instead of two.
    each = x.unflatten(2, (parts, attn.num_heads, attn.head_dim)).unbind(2)
    return tuple(part.transpose(1, 2) for part in each)


def drop_rates(blocks: Iterable[Any]) -> list[float]:
    """Return the probability that drop path drops a branch, for both branches of each block."""
    branches = [m for block in blocks for m in (block.drop_path1, block.drop_path2)]
    return [m.drop_prob if isinstance(m, DropPath) and m.training else 0.0 for m in branches]


def even(rates: Sequence[float]) -> bool:
    """Return whether the drop path rates rise linearly from the first block to the last, as timm's do."""
    steps = max(len(rates) // 2 - 1, 1)
    line = [rates[0] + (rates[-1] - rates[0]) * (i // 2) / steps for i in range(len(rates))]
    return all(abs(a - b) < 1e-6 for a, b in zip(rates, line, strict=True))


def drop_factors(rates: Sequence[float], crops: int, like: Tensor) -> Tensor | None:
    """Draw drop path's factors (blocks, 2, crops) of all branches: 0 with a branch's rate, else 1 / (1 - rate).

    `rates` has two equal entries for each block and rises linearly. If all rates are 0, None is returned."""
    if not any(rates):
        return None
    # The rates are computed on the device, as it would wait for a copy from the host.
    keep = 1 - torch.linspace(rates[0], rates[-1], len(rates) // 2, device=like.device, dtype=like.dtype)
    keep = keep.view(-1, 1, 1)
    return torch.bernoulli(keep.expand(-1, 2, crops)) / keep


def of_tokens(
    factors: Tensor | None, shapes: Sequence[tuple[int, int]], blocks: int
) -> Sequence[Sequence[Tensor | None]]:
    """Return drop path's factors (T, 1) for both branches of each block, equal for all tokens of a crop.

    `factors` are (blocks, 2, crops), and `shapes` (B, N) for each size. None: no branch has factors."""
    if factors is None:
        return [(None, None)] * blocks
    parts = factors.flatten(0, 1).split([b for b, _ in shapes], 1)
    tokens = [part.repeat_interleave(n, 1) for part, (_, n) in zip(parts, shapes, strict=True)]
    each = joined(tokens, 1).unsqueeze(2).unbind(0)
    return list(zip(each[::2], each[1::2], strict=True))


def drops_patches(model: Any) -> bool:
    """Return whether `visible_tokens` uses all layers of a model. True for plain ViTs without layers after pooling."""
    return (
        type(model) is VisionTransformer
        and model.attn_pool is None
        and not any(p.requires_grad for p in model.fc_norm.parameters())
    )


def visible_tokens(model: Any, images: Tensor, kept: Tensor) -> Tensor:
    """Return the output of a ViT's `forward_features`, tokens (B, P + n, D), for some patches of images (B, 3, S, S).

    Patches are kept at the positions `kept` (B, n), counted row by row; others are dropped before the first block."""
    x, first = embedded(model, images), model.num_prefix_tokens
    tokens = torch.cat([x[:, :first], take(x[:, first:], kept)], 1)
    return model.norm(model.blocks(tokens))


def allow_dropping(model: Any) -> None:
    """Let `keep_patches` choose how many patches of an image a model's blocks see.

    Raises UserError for a model whose patches cannot be left out."""
    if not maskable(model):
        raise UserError(
            f"curriculum: {type(model).__name__} cannot leave patches out, or does so in every phase; expected a plain "
            "vision transformer of timm without patch_drop_rate, or no keep"
        )
    model.patch_drop = PatchDropout(0.0, num_prefix_tokens=model.num_prefix_tokens)


def keep_patches(model: Any, share: float) -> None:
    """Let a model's blocks see only this share of each image's patches in training, drawn anew in each forward pass."""
    model.patch_drop.prob = 1 - share


def class_token_pooled(model: Any) -> bool:
    """Return whether a model's pooled vector is the class token, and `class_tokens` can compute its last block."""
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
    """Return the class tokens (B, 1, D) from the output of the model's `forward_features` for images (B, 3, S, S).

    The images have one size or, if the model packs, several."""
    *blocks, last = model.blocks
    if len(sizes) == 1 and (any(drop_rates(model.blocks)) or not packable(model)):  # here blocks draw their drop path
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
    """Draw drop path's factors (B, 1) for a branch on tokens (B, N, D), with the same random numbers as timm."""
    return drop(x.new_ones(len(x), 1)) if isinstance(drop, DropPath) and drop.drop_prob and drop.training else None


def _last(
    block: Any, x: Tensor, shapes: Sequence[tuple[int, int]], keep1: Tensor | None, keep2: Tensor | None
) -> Tensor:
    """Return the class tokens (crops, D) after a block on tokens x (T, D), with drop path's `keep1` and `keep2`."""
    token = add(_first(x, shapes), block.ls1(_attend_class(block.attn, block.norm1(x), shapes)), keep1)
    return add(token, block.ls2(block.mlp(block.norm2(token))), keep2)


def _first(x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    return joined([part[:, 0] for part in unpacked(x, shapes)])


def _attend_class(attn: Any, x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
    """Return an attention layer's output (crops, D) for the class tokens, which attend to tokens (T, D)."""
    rows = [attn.attn_dim, 2 * attn.attn_dim]
    w_q, w_kv = attn.qkv.weight.split(rows)
    b_q, b_kv = (None, None) if attn.qkv.bias is None else attn.qkv.bias.split(rows)
    first = _first(x, shapes)
    q, kv = F.linear(first, w_q, b_q), F.linear(x, w_kv, b_kv)
    if hasattr(attn.qkv, "lora"):
        q = attn.qkv.lora.add(q, first, slice(rows[0]))
        kv = attn.qkv.lora.add(kv, x, slice(rows[0], None))
    q = q.unflatten(1, (1, attn.num_heads, attn.head_dim)).transpose(1, 2)
    out = []
    for mine, part in zip(q.split([b for b, _ in shapes]), unpacked(kv, shapes), strict=True):
        k, v = by_head(part, 2, attn)
        out.append(F.scaled_dot_product_attention(attn.q_norm(mine), attn.k_norm(k), v).flatten(1))
    return attn.proj_drop(attn.proj(attn.norm(joined(out))))
