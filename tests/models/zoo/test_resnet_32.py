"""The ResNet of small images: every pixel is seen by the first stage."""

from pathlib import Path

import timm
import torch

from eagleray.engine.export import read_export, to_timm
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network


def test_its_blocks_are_those_of_a_resnet_18_and_its_grid_is_an_eighth_of_the_image() -> None:
    b = Backbone("resnet18_32")
    out = b(torch.randn(2, 3, 32, 32))
    assert (out.grid, out.pooled.shape) == ((4, 4), (2, 512))
    assert b.dims("stages") == [64, 128, 256, 512]
    ours, theirs = (dict(m.named_parameters()) for m in (b.model, timm.create_model("resnet18", num_classes=0)))
    assert {n: p.shape for n, p in ours.items() if n != "conv1.weight"} == {
        n: p.shape for n, p in theirs.items() if n != "conv1.weight"
    }
    assert ours["conv1.weight"].shape == (64, 3, 3, 3)


def test_other_channels_and_an_export(tmp_path: Path) -> None:
    options = {"in_chans": 5}
    b = Backbone("resnet18_32", options=options)
    to_timm(b, network := Network(name="resnet18_32", options=options), tmp_path)
    again = read_export(tmp_path / "backbone.safetensors")
    assert again.network == network
    x = torch.randn(1, 5, 32, 32)
    torch.testing.assert_close(again.backbone(x).pooled, b.eval()(x).pooled)
