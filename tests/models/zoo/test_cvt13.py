"""Tests of CvT-13: size, norm, and images of any shape. For golden vectors see test_golden_drloc_backbones."""

import pytest
import timm
import torch

from eagleray.models.backbone import Backbone
from eagleray.models.zoo.cvt13 import Attention, ChannelNorm

SMALL = {"dims": [8, 16, 24], "heads": [1, 2, 3], "depths": [1, 1, 2], "head_dim": 8}


def test_parameters() -> None:
    model = timm.create_model("cvt_13")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(19.94, abs=0.005)
    model = timm.create_model("cvt_13", num_classes=0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(19.94 - 0.385, abs=0.005)


def test_norm_adds_its_eps_to_the_deviation() -> None:
    x = torch.tensor([1e-5, -1e-5, 1e-5, -1e-5]).view(1, 4, 1, 1)
    torch.testing.assert_close(ChannelNorm(4)(x + 3).flatten(), x.flatten() / 2e-5, rtol=0.05, atol=0)


def test_keys_come_from_a_coarser_grid() -> None:
    attention, seen = Attention(8, heads=2, head_dim=4, kernel=3, kv_stride=2), []
    attention.kv.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    assert attention(torch.randn(2, 8, 6, 10)).shape == (2, 8, 6, 10)
    assert seen == [(2, 16, 3, 5)]


@pytest.mark.parametrize("size", [(64, 64), (96, 32), (50, 70)])
def test_any_size(size: tuple[int, int]) -> None:
    f = Backbone("cvt_13", options=SMALL).eval()(torch.randn(2, 3, *size))
    assert f.grid == (-(-size[0] // 16), -(-size[1] // 16))
    assert f.patches.shape == (2, f.grid[0] * f.grid[1], 24)
    torch.testing.assert_close(f.pooled, f.patches.mean(1))


def test_patches_lie_where_the_image_says() -> None:
    backbone = Backbone("cvt_13", options=SMALL).eval()
    x = torch.zeros(2, 3, 64, 96)
    x[1, :, 16:32, 48:64] = 3  # row 1, column 3; convolutions carry it into the patches to its right and below
    patches = backbone(x).patches
    seen = (patches[1] - patches[0]).norm(dim=1).topk(4).indices
    assert set(seen.tolist()) == {1 * 6 + 3, 1 * 6 + 4, 2 * 6 + 3, 2 * 6 + 4}


def test_every_parameter_learns_and_blocks_drop() -> None:
    backbone, x = Backbone("cvt_13", options=SMALL, drop_path=0.9), torch.randn(4, 3, 64, 64)
    assert not torch.equal(backbone(x).pooled, backbone(x).pooled)
    backbone = Backbone("cvt_13", options=SMALL)
    (backbone(x).pooled * torch.randn(24)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in backbone.parameters())
