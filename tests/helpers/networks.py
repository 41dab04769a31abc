"""Small backbones of every family."""

from typing import Any

import torch

from eagleray.models.backbone import Backbone

VIT: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SWIN: dict[str, Any] = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (1, 1)}
SWIN |= {"num_heads": (2, 4)}
RESNET: dict[str, Any] = {"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8), "stem_width": 8}
KINDS = {
    "vit_tiny_patch16_224": VIT,
    "swin_tiny_patch4_window7_224": SWIN,
    "resnet50": RESNET,
    "t2t_vit_14": {"embed_dim": 24, "depth": 1, "num_heads": 3, "token_dim": 16},
    "cvt_13": {"dims": (8, 12, 16), "depths": (1, 1, 1), "heads": (1, 1, 2), "head_dim": 8},
}


def network(name: str = "vit_tiny_patch16_224", seed: int = 0, **keys: Any) -> Backbone:
    torch.manual_seed(seed)
    options = KINDS[name] | keys.pop("options", {})
    return Backbone(name, **keys, options=options)
