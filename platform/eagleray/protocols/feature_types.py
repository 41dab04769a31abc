"""Which vectors of a backbone a protocol classifies: the pooled one, or what DINO and EsViT take of the last blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.models.stages import handed_on, stages
from eagleray.protocols.eval_mode import NOT_FINITE, trying

KINDS = {
    "pooled": "the class token, or the mean patch where there is none",
    "last4": "the last 4 blocks: class tokens of a ViT, mean patches of a pyramid's blocks (EsViT); a ResNet's pooled",
    "avgpool": "pooled, and the mean patch beside it (DINO's ViT-B)",
}
BLOCKS = 4


def read(backbone: Backbone, images: Tensor, kinds: Sequence[str]) -> dict[str, Tensor]:
    """Vectors (B, D) of each kind for images (B, 3, H, W), all from one forward pass. Raises UserError for a backbone
    that lacks them."""
    blocks = last_blocks(backbone.model) if "last4" in kinds else []
    out = {}
    with handed_on(blocks) as seen:
        if "avgpool" in kinds:
            out["pooled"], patches, _ = backbone(images)
            out["avgpool"] = torch.cat([out["pooled"], patches.mean(1)], 1)
        else:
            out["pooled"] = backbone.pooled(images)
    out["last4"] = torch.cat([summary(backbone.model, x) for x in seen] or [out["pooled"]], 1)
    return {kind: out[kind] for kind in kinds}


def check(backbone: Backbone, kind: str, size: int) -> None:
    """Raises UserError when the backbone cannot give such features of images of this size."""
    if kind not in KINDS:
        raise UserError(f"--features {kind}: unknown{config.nearest(kind, list(KINDS))}")
    x = torch.zeros(1, 3, size, size, device=next(backbone.parameters()).device)
    try:
        with torch.inference_mode(), trying(backbone, f"gives no {kind} features of images of --size {size}"):
            if not all(value.isfinite().all() for value in read(backbone, x, [kind]).values()):
                raise ValueError(NOT_FINITE)
    except UserError as e:
        raise UserError(f"--features {kind}: {str(e).removeprefix('backbone.name: ')}") from None


def has(backbone: Backbone, kind: str, size: int) -> bool:
    try:
        check(backbone, kind, size)
    except UserError:
        return False
    return True


def last_blocks(model: Any) -> list[Any]:
    """The last 4 blocks, whatever stages they are in; none of a ResNet, of which DINO takes the pooled vector."""
    parts = stages(model)
    if hasattr(model, "layer4"):
        return []
    blocks = parts if hasattr(model, "blocks") else [block for part in parts for block in blocks_of(part)]
    if len(blocks) < BLOCKS:
        raise UserError(f"{type(model).__name__} has {len(blocks)} blocks, and its last {BLOCKS} were asked for")
    return blocks[-BLOCKS:]


def blocks_of(stage: Any) -> list[Any]:
    """The blocks of a stage, without what changes the grid before them."""
    inside = stage.blocks if hasattr(stage, "blocks") else stage
    try:
        return [m for m in inside if hasattr(m, "mlp")]
    except TypeError:
        raise UserError(f"{type(stage).__name__} has no blocks that could be read one by one") from None


def summary(model: Any, tokens: Tensor) -> Tensor:
    """What a block is summed up by (B, C): through the final norm where it is as wide as that, then a ViT's class token
    or the mean patch. The tokens are (B, N, C), (B, h, w, C) or (B, C, h, w)."""
    if tokens.ndim == 4:
        nchw = getattr(model, "stage_fmt", getattr(model, "output_fmt", "NCHW")) != "NHWC"
        tokens = (tokens.permute(0, 2, 3, 1) if nchw else tokens).flatten(1, 2)
    if tokens.shape[2] == model.num_features:  # of the last stage, the others are wider apart: EsViT leaves them raw
        tokens = getattr(model, "norm", nn.Identity())(tokens)
    prefix = prefixed(model, tokens)
    return tokens[:, 0] if prefix else tokens.mean(1)


def prefixed(model: Any, tokens: Tensor) -> bool:
    """Whether tokens (B, N, C) begin with a class token, or with the global one of a stage of ViL."""
    if getattr(model, "cls_token", None) is not None:
        return True
    return int(tokens.shape[1] ** 0.5) ** 2 == tokens.shape[1] - 1
