"""A plain vision transformer on some of the patches of each image (He et al. 2021, arXiv:2111.06377, MAE's encoder).

B images, N patches, n of them kept, P prefix tokens, such as the class token, D channels.
"""

from typing import Any

import torch
from timm.layers import PatchDropout
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.models.packing import embedded, maskable, take


def drops_patches(model: Any) -> bool:
    """Return whether `visible_tokens` trains the whole of a model: of timm's, only plain ViTs without layers after
    their pooling."""
    return (
        type(model) is VisionTransformer
        and model.attn_pool is None
        and not any(p.requires_grad for p in model.fc_norm.parameters())
    )


def visible_tokens(model: Any, images: Tensor, kept: Tensor) -> Tensor:
    """Return what a ViT's `forward_features` returns for images (B, 3, S, S) whose patches are dropped before the first
    block, but for those at the positions kept (B, n), counted row by row: tokens (B, P + n, D)."""
    x, first = embedded(model, images), model.num_prefix_tokens
    tokens = torch.cat([x[:, :first], take(x[:, first:], kept)], 1)
    out: Tensor = model.norm(model.blocks(tokens))
    return out


def allow_dropping(model: Any) -> None:
    """Let `keep_patches` choose how many patches of an image a model's blocks see. Raises UserError for a model whose
    patches cannot be left out."""
    if not maskable(model):
        raise UserError(
            f"curriculum: {type(model).__name__} cannot leave patches out, or does so in every phase; expected a plain "
            "vision transformer of timm without patch_drop_rate, or no keep"
        )
    model.patch_drop = PatchDropout(0.0, num_prefix_tokens=model.num_prefix_tokens)


def keep_patches(model: Any, share: float) -> None:
    """Show the blocks of a model only this share of each image's patches while training, drawn anew in each forward."""
    model.patch_drop.prob = 1 - share
