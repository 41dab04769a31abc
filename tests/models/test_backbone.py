"""Tests of every listed backbone: any crop size, gradients, and an export that timm loads."""

import os
from pathlib import Path

import pytest
import torch

from eagleray.base.errors import UserError
from eagleray.engine.export import to_timm
from eagleray.models.backbone import Backbone
from eagleray.models.ema import ema_copy
from eagleray.models.network import TESTED, Network

STRIDE_16 = ("vit", "deit", "cvt_13", "t2t")


@pytest.mark.parametrize("name", TESTED)
def test_any_crop_size(name: str):
    backbone = Backbone(name)
    for size in (64, 96):
        f = backbone(torch.randn(2, 3, size, size))
        assert f.pooled.shape == (2, backbone.dim)
        assert f.patches.shape == (2, f.grid[0] * f.grid[1], backbone.dim)
        assert abs(f.grid[0] - size / (16 if name.startswith(STRIDE_16) else 32)) < 1
    f.pooled.square().mean().backward()
    assert all(p.grad is not None for n, p in backbone.named_parameters() if "cls_token" not in n)


@pytest.mark.parametrize("name", TESTED)
def test_builds_before_any_memory_is_taken(name: str):
    """A backbone is built on the meta device, as `pretrain` does to check a recipe before it starts."""
    with torch.device("meta"):
        assert Backbone(name, drop_path=0.1).dim > 0


def test_patches_lie_where_the_image_says():
    backbone = Backbone("vit_tiny_patch16_224", options={"depth": 0, "pos_embed": "none"})
    x = torch.zeros(1, 3, 64, 64)
    x[:, :, 16:32, 48:64] = 3  # row 1, column 3
    f = backbone(x)
    odd = (f.patches[0] - f.patches[0].median(0).values).abs().sum(1)
    assert f.grid == (4, 4)
    assert odd.argmax() == 1 * 4 + 3


def test_moco_settings():
    b = Backbone("vit_tiny_patch16_224", init="moco", position="sincos", freeze_patch=True)
    assert not any(p.requires_grad for p in b.model.patch_embed.parameters())
    assert not b.model.pos_embed.requires_grad
    assert b.model.pos_embed[0, 0].abs().max() == 0
    bound = (6 / (3 * 16 * 16 + 192)) ** 0.5
    weight = b.model.patch_embed.proj.weight
    assert bound * 0.99 < weight.abs().max() <= bound


def test_a_momentum_copy_never_drops():
    b = Backbone("vit_tiny_patch16_224", drop_path=0.9, options={"depth": 4}).train()
    copy, x = ema_copy(b), torch.randn(4, 3, 32, 32)
    assert not torch.equal(b(x).pooled, b(x).pooled)
    assert torch.equal(copy(x).pooled, copy(x).pooled)
    assert not any(p.requires_grad for p in copy.parameters())


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "swin_tiny_patch4_window7_224",
        pytest.param("resnet50", marks=pytest.mark.slow),
        "vil_tiny",
    ],
)
def test_exports_load_in_timm(name: str, tmp_path: Path):
    backbone = Backbone(name)
    with torch.no_grad():
        for p in backbone.parameters():
            p.add_(0.01 * torch.randn_like(p))
    path = to_timm(backbone, Network(name=name), tmp_path)
    assert path.exists()
    assert backbone.training


def test_an_export_that_differs_does_not_count(tmp_path: Path):
    backbone = Backbone("vit_tiny_patch16_224", options={"depth": 2})
    backbone.model.norm.eps = 10.0  # something that no weight carries
    with pytest.raises(UserError, match="timm's outputs differ"):
        to_timm(backbone, Network(name="vit_tiny_patch16_224", options={"depth": 2}), tmp_path)
    assert not (tmp_path / "backbone.safetensors").exists()


def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    backbone = Backbone("vit_tiny_patch16_224", options={"depth": 2})
    to_timm(backbone, Network(name="vit_tiny_patch16_224", options={"depth": 2}), tmp_path)
    assert [Path(name).name for name in synced][:2] == [".part.backbone", tmp_path.name]


def test_what_a_killed_export_leaves_is_nothing_that_timm_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def compared(_: Backbone, files: object, part: Path) -> float:
        assert part.exists()
        assert not list(tmp_path.glob("*.safetensors"))  # as timm looks, which finds hidden files too
        return 0.0

    monkeypatch.setattr("eagleray.engine.export.compare", compared)
    backbone = Backbone("vit_tiny_patch16_224", options={"depth": 2})
    to_timm(backbone, Network(name="vit_tiny_patch16_224", options={"depth": 2}), tmp_path)


def test_position_needs_a_table():
    with pytest.raises(UserError, match="resnet50 has no position table"):
        Backbone("resnet50", position="sincos")


@pytest.mark.parametrize(
    "name", ["naflexvit_base_patch16_gap", "mixer_s32_224", "crossvit_tiny_240", "xcit_nano_12_p8_224"]
)
def test_a_model_without_a_grid_of_patches_is_one_line(name: str):
    with torch.device("meta"):
        backbone = Backbone(name)
        with pytest.raises(
            UserError, match=r"^backbone\.name: \w+ has no grid of patches; expected a vision transformer"
        ):
            backbone(torch.empty(2, 3, 240, 240) if "240" in name else torch.empty(2, 3, 224, 224))


@pytest.mark.parametrize(("name", "side"), [("vit_tiny_r_s16_p8_224", 7), ("vitamin_small_224", 14)])
def test_the_patches_of_a_hybrid_are_cells_of_its_cnn(name: str, side: int):
    with torch.device("meta"):
        features = Backbone(name)(torch.empty(2, 3, 224, 224))
    assert features.grid == (side, side)
    assert features.patches.shape[1] == side * side


def test_a_momentum_copy_of_a_cnn_has_no_dropout():
    net = Backbone("resnet10t", options={"drop_rate": 0.9, "drop_block_rate": 0.5})
    copy, x = ema_copy(net), torch.randn(4, 3, 64, 64)
    assert copy.training
    assert torch.equal(copy.pooled(x), copy.pooled(x))
