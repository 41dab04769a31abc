"""Tests of PVT-Small: size, reduced keys, and position tables for images of other sizes."""

import pytest
import timm
import torch

from eagleray.models.backbone import Backbone
from eagleray.models.zoo.pvt import PVT, Stage

SMALL = {"dims": [8, 16, 16, 24], "heads": [1, 2, 2, 3], "depths": [1, 1, 1, 1], "img_size": 64}


def test_parameters() -> None:
    model = timm.create_model("pvt_small")
    count = sum(p.numel() for p in model.parameters()) + 2 * 512  # the paper's class token and its position
    assert count / 1e6 == pytest.approx(24.5, abs=0.05)
    blocks = [len(stage.blocks) for stage in model.stages]
    assert blocks == [3, 4, 6, 3]


def test_keys_come_from_a_reduced_grid() -> None:
    model, seen = PVT(**SMALL, reductions=[8, 4, 2, 1]), []
    for stage in model.stages:
        stage.blocks[0].attn.kv.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model.forward_features(torch.randn(1, 3, 64, 128))  # grids of 16 x 32 to 2 x 4
    assert seen == [2 * 4] * 4


def test_positions_at_another_size() -> None:
    stage = Stage(3, 2, patch=4, size=4, blocks=[])
    table = torch.stack([torch.arange(4.0).view(4, 1).expand(4, 4), torch.full((4, 4), 5.0)])  # row number; constant
    stage.position.data[:] = table
    assert torch.equal(stage.positions(torch.Size((4, 4))), table.flatten(1).T.unsqueeze(0))
    rows, constant = stage.positions(torch.Size((8, 2)))[0].T
    torch.testing.assert_close(constant, torch.full((16,), 5.0))
    torch.testing.assert_close(rows.view(8, 2)[1:-1, 0], torch.arange(0.25, 3, 0.5))  # centres of half as high patches
    assert torch.equal(rows.view(8, 2)[:, 0], rows.view(8, 2)[:, 1])


@pytest.mark.parametrize("size", [(64, 64), (96, 32), (224, 224)])
def test_any_size(size: tuple[int, int]) -> None:
    f = Backbone("pvt_small", options=SMALL).eval()(torch.randn(2, 3, *size))
    assert f.grid == (size[0] // 32, size[1] // 32)
    assert f.patches.shape == (2, f.grid[0] * f.grid[1], 24)
    torch.testing.assert_close(f.pooled, f.patches.mean(1))


def test_patches_lie_where_the_image_says() -> None:
    backbone = Backbone("pvt_small", options=SMALL).eval()
    x = torch.zeros(2, 3, 64, 128)
    x[1, :, 32:64, 64:96] = torch.randn(3, 32, 32)  # row 1, column 2
    patches = backbone(x).patches
    (most, other), at = (patches[1] - patches[0]).norm(dim=1).topk(2)
    assert at[0] == 1 * 4 + 2
    assert most > 10 * other  # only attention, weak at the start, carries it further


def test_every_parameter_learns_and_blocks_drop() -> None:
    backbone, x = Backbone("pvt_small", options=SMALL, drop_path=0.9), torch.randn(4, 3, 64, 64)
    assert not torch.equal(backbone(x).pooled, backbone(x).pooled)
    backbone = Backbone("pvt_small", options=SMALL)
    (backbone(x).pooled * torch.randn(24)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in backbone.parameters())
