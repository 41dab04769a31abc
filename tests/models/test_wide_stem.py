"""Tests of the stem of wide ResNets."""

import pytest
import torch

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone


@pytest.mark.parametrize(("times", "millions"), [(1, 24), (2, 94), (4, 375)])
def test_a_wide_resnet_has_the_parameters_of_the_papers(times: int, millions: int):
    """They are counted as in table 1 of BYOL and table 6 of SimCLR, without a classifier."""
    channels = [times * c for c in (64, 128, 256, 512)]
    with torch.device("meta"):
        b = Backbone("resnet50", stem="wide", options={"channels": channels})
    assert b.model.conv1.out_channels == b.model.bn1.num_features == 64 * times
    assert sum(p.numel() for p in b.parameters()) / 1e6 == pytest.approx(millions, rel=0.01, abs=0.5)
    assert b.dim == 2048 * times


def test_a_stem_that_is_wide_already_is_timms_in_shape_and_scale():
    torch.manual_seed(0)
    plain, wide = Backbone("resnet50"), Backbone("resnet50", stem="wide")
    theirs, ours = plain.model.state_dict(), wide.model.state_dict()
    assert {n: x.shape for n, x in ours.items()} == {n: x.shape for n, x in theirs.items()}
    for name in ("conv1.weight", "layer1.0.conv1.weight", "layer1.0.downsample.0.weight"):
        assert ours[name].std().item() == pytest.approx(theirs[name].std().item(), rel=0.1)


def test_features_and_gradients_pass_through_a_wide_stem():
    b = Backbone("resnet50", stem="wide", options={"channels": [32, 8, 8, 8], "layers": [1, 1, 1, 1]})
    f = b(torch.randn(2, 3, 64, 64))
    assert f.patches.shape == (2, 4, b.dim)
    f.pooled.square().sum().backward()
    assert b.model.conv1.weight.grad.any()


@pytest.mark.parametrize("name", ["resnet18", "resnet50d", "vit_tiny_patch16_224"])
def test_models_without_such_a_stem_are_refused_in_a_line(name: str):
    with torch.device("meta"), pytest.raises(UserError, match=f"backbone.stem=wide: {name} is no ResNet of") as e:
        Backbone(name, stem="wide")
    assert "\n" not in str(e.value)
