"""Read the types of features that protocols classify: the pooled vector, with or without the mean patch, or the last
four blocks as in DINO and EsViT."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.models.stages import stage_outputs, stages
from eagleray.protocols.eval_mode import NOT_FINITE, explain_failure

KINDS = {
    "pooled": "the class token, or the mean patch where there is none",
    "last4": "the last 4 blocks: class tokens of a ViT, mean patches of a pyramid's blocks (EsViT); a ResNet's pooled",
    "avgpool": "pooled, and the mean patch beside it (DINO's ViT-B)",
}
BLOCKS = 4


def read(backbone: Backbone, images: Tensor, kinds: Sequence[str]) -> dict[str, Tensor]:
    """Return the feature vectors (B, D) of each type in `kinds` for images (B, 3, H, W), from a single forward pass.

    Raises UserError when the backbone lacks one of the types."""
    blocks = last_blocks(backbone.model) if "last4" in kinds else []
    out = {}
    with stage_outputs(blocks) as seen:
        if "avgpool" in kinds:
            out["pooled"], patches, _ = backbone(images)
            out["avgpool"] = torch.cat([out["pooled"], patches.mean(1)], 1)
        else:
            out["pooled"] = backbone.pooled(images)
    out["last4"] = torch.cat([block_vector(backbone.model, x) for x in seen] or [out["pooled"]], 1)
    return {kind: out[kind] for kind in kinds}


def check(backbone: Backbone, kind: str, size: int) -> None:
    """Raise UserError when the backbone has no features of type `kind` for square images of `size` pixels."""
    if kind not in KINDS:
        raise UserError(f"--features {kind}: unknown{config.nearest(kind, list(KINDS))}")
    x = torch.zeros(1, backbone.channels, size, size, device=next(backbone.parameters()).device)
    try:
        with torch.inference_mode(), explain_failure(backbone, f"gives no {kind} features of images of --size {size}"):
            if not all(value.isfinite().all() for value in read(backbone, x, [kind]).values()):
                raise ValueError(NOT_FINITE)
    except UserError as e:
        raise UserError(f"--features {kind}: {str(e).removeprefix('backbone.name: ')}") from None


def has(backbone: Backbone, kind: str, size: int) -> bool:
    """Return whether the backbone has features of type `kind` for square images of `size` pixels."""
    try:
        check(backbone, kind, size)
    except UserError:
        return False
    return True


def last_blocks(model: Any) -> list[Any]:
    """Return the last 4 blocks of a model, which may belong to several stages.

    For a ResNet the list is empty, because DINO uses its pooled vector instead.

    Raises UserError when the model has fewer than 4 blocks."""
    parts = stages(model)
    if hasattr(model, "layer4"):
        return []
    blocks = parts if hasattr(model, "blocks") else [block for part in parts for block in blocks_of(part)]
    if len(blocks) < BLOCKS:
        raise UserError(
            f"{type(model).__name__} has {len(blocks)} blocks; expected {BLOCKS} or more, as the last {BLOCKS} are read"
        )
    return blocks[-BLOCKS:]


def blocks_of(stage: Any) -> list[Any]:
    """Return the blocks of a stage, without the downsampling layer that may precede them."""
    inside = stage.blocks if hasattr(stage, "blocks") else stage
    try:
        return [m for m in inside if hasattr(m, "mlp")]
    except TypeError:
        raise UserError(f"{type(stage).__name__} has no blocks that can be read one by one") from None


def block_vector(model: Any, tokens: Tensor) -> Tensor:
    """Reduce the tokens of a block, (B, N, C), (B, h, w, C) or (B, C, h, w), to one vector (B, C) for each image.

    The vector is the class token of a ViT, or else the mean of the patches. The final norm is applied first if its
    width is that of the tokens."""
    if tokens.ndim == 4:
        nchw = getattr(model, "stage_fmt", getattr(model, "output_fmt", "NCHW")) != "NHWC"
        tokens = (tokens.permute(0, 2, 3, 1) if nchw else tokens).flatten(1, 2)
    if tokens.shape[2] == model.num_features:  # the last stage; EsViT leaves the others without a norm
        tokens = getattr(model, "norm", nn.Identity())(tokens)
    return tokens[:, 0] if has_class_token(model, tokens) else tokens.mean(1)


def has_class_token(model: Any, tokens: Tensor) -> bool:
    """Return whether the first of the tokens (B, N, C) stands for the whole image.

    It does so if it is a class token, or ViL's global token of a stage."""
    if getattr(model, "cls_token", None) is not None:
        return True
    return int(tokens.shape[1] ** 0.5) ** 2 == tokens.shape[1] - 1
