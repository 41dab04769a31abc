"""Tests of the Swin that pads before it shifts: it equals timm's where nothing is padded."""

from functools import cache, partial
from typing import Any

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import nn

from eagleray.models.backbone import Backbone
from eagleray.models.zoo.swin import EsViTSwin

TINY: dict[str, Any] = {"embed_dim": 8, "depths": (2, 2, 2), "num_heads": (1, 2, 2), "num_classes": 0}
NARROW: dict[str, Any] = {"embed_dim": 8, "num_heads": (1, 1, 2, 2)}
PARAMETERS = {"tiny_w7": 27.52, "tiny_w14": 27.57, "small_w14": 48.97, "base_w7": 86.74, "base_w14": 86.92}


@pytest.fixture
def pair() -> tuple[EsViTSwin, SwinTransformer]:
    """Build our model and timm's with the same weights, for 112 pixels: grids of 28, 14 and 7 (one window)."""
    ours = EsViTSwin(img_size=112, **TINY).eval()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.1 * torch.randn_like(p))
    norm = partial(nn.LayerNorm, eps=1e-6)
    timms = SwinTransformer(img_size=112, strict_img_size=False, norm_layer=norm, **TINY).eval()
    timms.load_state_dict(ours.state_dict())
    return ours, timms


@pytest.mark.parametrize("size", [(112, 112), (56, 112), (112, 168)])
def test_equals_timm_where_windows_fit(pair: tuple[EsViTSwin, SwinTransformer], size: tuple[int, int]):
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(pair[0].forward_features(x), pair[1].forward_features(x))


def test_differs_where_a_shifted_grid_is_padded(pair: tuple[EsViTSwin, SwinTransformer]):
    x = torch.randn(2, 3, 96, 96)
    ours, timms = pair[0].forward_features(x), pair[1].forward_features(x)
    assert (ours - timms).norm() / timms.norm() > 0.01


def test_a_small_grid_is_a_larger_one_with_zeros_at_its_edge(pair: tuple[EsViTSwin, SwinTransformer]):
    block = pair[0].layers[0].blocks[1]
    assert block.shift_size == (3, 3)
    x = torch.randn(1, 14, 14, 8)
    x[:, 10:] = x[:, :, 10:] = 0
    torch.testing.assert_close(block._attn(x[:, :10, :10]), block._attn(x)[:, :10, :10])


@pytest.mark.parametrize("window", [7, 14])
def test_weights_are_timms_key_for_key(window: int):
    with torch.device("meta"):
        ours = timm.create_model(f"esvit_swin_tiny_w{window}", num_classes=0)
        timms = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, window_size=window)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in timms.state_dict().items()}


def test_a_window_of_14_is_the_whole_grid_of_the_last_two_stages():
    with torch.device("meta"):
        model = timm.create_model("esvit_swin_tiny_w14", num_classes=0)
    odd = [stage.blocks[1] for stage in model.layers]
    assert [b.window_size for b in odd] == [(14, 14), (14, 14), (14, 14), (7, 7)]
    assert [b.shift_size for b in odd] == [(7, 7), (7, 7), (0, 0), (0, 0)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str):
    with torch.device("meta"):
        model = timm.create_model(f"esvit_swin_{name}", num_classes=0)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == PARAMETERS[name]
    assert all(m.eps == 1e-6 for m in model.modules() if isinstance(m, nn.LayerNorm))


@pytest.mark.parametrize("name", ["esvit_swin_tiny_w7", "esvit_swin_tiny_w14"])
def test_any_crop_size(name: str):
    backbone = Backbone(name, drop_path=0.1, options={**NARROW, "depths": (2,) * 4})
    for h, w in ((224, 224), (96, 96), (96, 160)):
        f = backbone(torch.randn(2, 3, h, w))
        assert f.grid == (h // 32, w // 32)
        torch.testing.assert_close(f.pooled, f.patches.mean(1))
    f.pooled.square().mean().backward()
    assert all(p.grad is not None for p in backbone.parameters())


@pytest.mark.slow
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch):
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr("eagleray.models.backbone.compile_once", cache(partial(torch.compile, backend=backend)))
    backbone = Backbone("esvit_swin_tiny_w7", drop_path=0.1, options={**NARROW, "depths": (2,) * 4})
    backbone.compiled = True
    for _ in range(3):
        outs = backbone.sizes([torch.randn(2, 3, s, s) for s in (224, 96)])
        sum(out.pooled.square().mean() for out in outs).backward()
    assert len(graphs) == 1
