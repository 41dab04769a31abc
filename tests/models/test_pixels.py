"""Weights that were trained with other colours give the same features of ours."""

from typing import Any

import pytest
import torch
from helpers.networks import network
from torch import Tensor

from eagleray.models.pixels import OURS, Pixels
from eagleray.models.weights import Weights, fill

THEIRS = Pixels((0.5, 0.4, 0.0), (0.5, 0.25, 1.0))


def coloured(images: Tensor, pixels: Pixels) -> Tensor:
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in pixels)
    return (images - mean) / std


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("vit_tiny_patch16_224", {}, (16, 32)),
        ("vit_tiny_patch16_224", {"pre_norm": True}, (16, 32)),  # as CLIP's: without a bias of the projection
        ("vit_tiny_patch16_224", {"pre_norm": True, "no_embed_class": True, "reg_tokens": 2}, (16, 32)),
        ("swin_tiny_patch4_window7_224", {}, (32, 64)),
    ],
)
def test_features_of_our_colours_are_those_of_theirs(name: str, options: dict[str, Any], sizes: tuple[int, int]):
    theirs, ours = network(name, seed=1, options=options).eval(), network(name, options=options).eval()
    before = {k: v.clone() for k, v in theirs.model.state_dict().items()}
    given = Weights("x", theirs.model.state_dict(), {}, pixels=THEIRS)
    for _ in range(2):  # which does not convert twice
        assert not fill(ours, given, whole=True).warning
    for size in sizes:
        images = torch.rand(3, 3, size, size)
        with torch.no_grad():
            have, want = ours(coloured(images, OURS)), theirs(coloured(images, THEIRS))
        for x, y in (have.pooled, want.pooled), (have.patches, want.patches):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in theirs.model.state_dict().items())


def test_a_convolution_that_pads_is_left_with_a_warning_that_names_both():
    theirs, ours = network("resnet50", seed=1), network("resnet50")
    report = fill(ours, Weights("x", theirs.model.state_dict(), {}, "start.from", THEIRS))
    assert list(report.lines())[1] == (
        "warning: start.from=x: was trained with pixels of mean 0.5, 0.4, 0 and std 0.5, 0.25, 1, and gets ours, mean "
        "0.485, 0.456, 0.406 and std 0.229, 0.224, 0.225: the first layer of ResNet cannot convert them exactly"
    )
    assert torch.equal(ours.model.conv1.weight, theirs.model.conv1.weight)
    assert not fill(ours, Weights("x", theirs.model.state_dict(), {})).warning
