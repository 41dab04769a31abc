"""The `backbone` section of a recipe: a network by its timm name, and what is changed about it."""

from dataclasses import field
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from eagleray.config import STRICT
from eagleray.config.types import Share

# Backbones that the tests run forward, backward and through an export. Any other model of timm can be named too.
TESTED = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "deit_small_patch16_224",
    "swin_tiny_patch4_window7_224",
    "resnet50",
    *("esvit_swin_tiny_w7", "vil_tiny", "cvt_tiny_esvit", "pvt_small", "cvt_13", "t2t_vit_14"),
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Network:
    """The backbone: a timm name and what is changed about it."""

    name: str = "vit_small_patch16_224"
    # What it starts from: a run, checkpoint or file of tensors, or timm:NAME for timm's pretrained ones; None: nothing.
    weights: str | None = None
    drop_path: Share = 0.0  # of the student; momentum copies never drop
    init: Literal["timm", "moco"] = "timm"
    # How a ViT places its patches at any crop size: a trained table resampled as in timm or DINO, a fixed one, none.
    position: Literal["timm", "sincos", "dino", "none"] = "timm"
    # A ViT's vector. mean: of its patches, with neither class token nor final norm; norm_mean: of its patches after the
    # final norm, without class token.
    pool: Literal["timm", "mean", "norm_mean"] = "timm"
    norm: Literal["timm", "batch"] = "timm"  # batch: in front of a ViT's MLPs, over images and tokens (ViT-BN)
    stem: Literal["timm", "conv"] = "timm"  # conv: four 3x3 convolutions instead of the projection of 16-pixel patches
    freeze_patch: bool = False  # the random patch projection is not trained (MoCo v3)
    options: dict[str, Any] = field(default_factory=dict)  # handed to timm.create_model
