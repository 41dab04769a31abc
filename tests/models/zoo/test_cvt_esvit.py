"""Tests of EsViT's CvT: what a window sees, and any crop size."""

import pytest
import timm
import torch
from torch import Tensor, nn

from eagleray.models.backbone import Backbone
from eagleray.models.batch_norm import PortableSyncBatchNorm, sync_batch_norms
from eagleray.models.zoo.cvt_esvit import WindowAttention


@pytest.fixture
def attn() -> WindowAttention:
    return WindowAttention(8, heads=2, window=4).eval()


def changed(attn: WindowAttention, x: Tensor, row: int, column: int) -> list[list[int]]:
    """Return the patches whose outputs change when the patch at (row, column) changes."""
    other = x.clone()
    other[:, :, row, column] += 1
    return ((attn(other) - attn(x)).abs().amax((0, 1)) > 1e-6).nonzero().tolist()


@torch.no_grad()
def test_a_patch_reaches_its_window_and_those_it_touches(attn: WindowAttention):
    x = torch.randn(1, 8, 8, 12)
    assert changed(attn, x, 1, 1) == [[i, j] for i in range(4) for j in range(4)]
    assert changed(attn, x, 1, 4) == [[i, j] for i in range(4) for j in range(8)]  # beside a border: the convolution


@torch.no_grad()
def test_one_window_is_attention_of_all_to_all(attn: WindowAttention):
    x = torch.randn(2, 8, 4, 4)
    q, k, v = attn.qkv(x).flatten(2).view(2, 3, 2, 4, 16).unbind(1)  # (B, heads, channels, patches)
    p = (q.mT @ k / 8**0.5).softmax(-1)  # of 8 channels in all, not of a head's 4
    torch.testing.assert_close(attn(x), attn.proj((v @ p.mT).reshape(2, 8, 4, 4)))


@torch.no_grad()
def test_padding_is_attended_to(attn: WindowAttention):
    x = torch.randn(1, 8, 6, 5)
    padded = torch.zeros(1, 8, 8, 8)
    padded[:, :, :6, :5] = x
    torch.testing.assert_close(attn(x), attn(padded)[:, :, :6, :5])


def test_a_window_is_no_larger_than_the_grid(attn: WindowAttention):
    x = torch.randn(1, 8, 3, 3)
    whole = WindowAttention(8, heads=2, window=3).eval()
    whole.load_state_dict(attn.state_dict())
    assert torch.equal(attn(x), whole(x))


def test_parameters():
    with torch.device("meta"):
        model = timm.create_model("cvt_tiny_esvit", num_classes=0, drop_path_rate=0.1)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 29.30
    rates = [block.drop_path.drop_prob for stage in model.stages for block in stage[2:]]
    assert rates == pytest.approx([0.1 * i / 11 for i in range(12)])


def test_any_crop_size():
    small = {"dims": (8, 8, 16, 16), "heads": (1, 2, 2, 2), "depths": (1, 1, 1, 1)}
    backbone = Backbone("cvt_tiny_esvit", drop_path=0.1, options=small)
    for h, w in ((224, 224), (96, 96), (96, 160)):
        f = backbone(torch.randn(2, 3, h, w))
        assert f.grid == (h // 32, w // 32)
        torch.testing.assert_close(f.pooled, f.patches.mean(1))
    f.pooled.square().mean().backward()
    assert all(p.grad is not None for p in backbone.parameters())


def test_batch_norm_becomes_one_over_all_ranks():
    with torch.device("meta"):
        model = timm.create_model("cvt_tiny_esvit", num_classes=0)
    found = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    sync_batch_norms(model, torch.device("cpu"))
    assert len(found) == 2 + 2 + 6 + 2
    assert all(isinstance(m, PortableSyncBatchNorm) for m in found)
