"""Positions by matrices are those that timm and DINO interpolate."""

import copy
from typing import Any

import pytest
import torch

from eagleray.exports.positions import make_resizable
from eagleray.models.backbone import Backbone

SIZES = ((64, 64), (32, 48), (48, 32), (16, 128), (128, 160), (8, 8), (200, 200))
TINY = {"img_size": 64, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"position": "dino"},
        {"position": "sincos"},
        {"pool": "norm_mean"},
        {"options": {"reg_tokens": 2}},
        {"options": {"reg_tokens": 1, "no_embed_class": True}},
        {"options": {"img_size": (96, 64)}},
    ],
    ids=str,
)
def test_any_size(keys: dict[str, Any]):
    keys = keys | {"options": TINY | keys.get("options", {})}
    torch.manual_seed(0)
    model = Backbone("vit_tiny_patch16_224", **keys).eval().model
    torch.nn.init.normal_(model.pos_embed)
    changed = copy.deepcopy(model)
    make_resizable(changed, keys.get("position", "timm"))
    for h, w in SIZES:
        patches = torch.randn(2, h // 8, w // 8, 12)
        torch.testing.assert_close(changed._pos_embed(patches), model._pos_embed(patches), atol=2e-5, rtol=1e-4)
