"""Rotary positions of DINOv3's transformers: timm's own where nothing is drawn, and draws that follow from the step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eagleray.models.backbone import Backbone
from eagleray.models.checkpointing import checkpoint_blocks
from eagleray.models.ema import ema_copy
from eagleray.models.rotary import rotary, rotations
from eagleray.models.tokens import Hidden

BOX = {"rope_shift_coords": 0.3, "rope_jitter_coords": 1.5, "rope_rescale_coords": 2.0}
SIZE = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "global_pool": "token"}


def network(**options: Any) -> Backbone:
    torch.manual_seed(0)
    out = Backbone("vit_small_patch16_dinov3", options=SIZE | {"init_values": 0.5} | options)
    with torch.no_grad():
        out.model.reg_token.normal_()
    return out


def images(*sides: int) -> Tensor:
    return torch.randn(3, 3, *sides, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sides", [(16, 16), (8, 20)])
def test_without_draws_positions_and_features_are_those_of_timm(sides: tuple[int, int]) -> None:
    net = network()
    grid = (sides[0] // 4, sides[1] // 4)
    torch.testing.assert_close(rotations(net.model, grid, 5)[2], net.model.rope.get_embed(grid))
    trained, x = net(images(*sides)), images(*sides)
    with torch.no_grad():
        torch.testing.assert_close(trained.patches, net.model.forward_features(x)[:, 5:])
        torch.testing.assert_close(net.eval()(x).patches, trained.patches)


def test_draws_follow_from_the_step_the_size_and_the_block_alone() -> None:
    net, other = network(**BOX), network(**BOX)
    first = rotations(net.model, (4, 4), 7)
    torch.manual_seed(99)  # as another rank has it
    assert torch.equal(rotations(other.model, (4, 4), 7), first)
    assert not torch.equal(rotations(net.model, (4, 4), 8), first)
    assert not torch.equal(first[0], first[1])
    x = images(16, 16)
    net.draw = other.draw = 3
    assert torch.equal(net(x).pooled, other(x).pooled)
    other.micro_batch = 2
    torch.testing.assert_close(net(x).pooled, other(x).pooled)
    assert torch.equal(net.grids(x, "last")[0], net(x).pooled)
    net.draw = 4
    assert not torch.allclose(net(x).pooled, other(x).pooled)


@pytest.mark.parametrize("key", BOX)
def test_boxes_have_the_ranges_of_their_keys(key: str) -> None:
    """The angles of the longest period p, which do not turn around, say where the corners (0, 0) and (1, 1) are."""
    net, limit = network(**{key: BOX[key]}), BOX[key]
    p = float(net.model.rope.periods[-1])
    sines = torch.cat([rotations(net.model, (2, 2), seed) for seed in range(60)])[:, ::3, [2, 5]]  # (n, 2 corners, 2)
    first, last = (sines.asin() * p / (2 * torch.pi)).unbind(1)
    scale, middle = last - first, (first + last) / 2
    shift = middle / scale
    if key == "rope_shift_coords":
        torch.testing.assert_close(scale, torch.ones_like(scale))
        assert 0.9 * limit < shift.abs().max() <= limit * (1 + 1e-4)
        return
    torch.testing.assert_close(shift, torch.zeros_like(shift), atol=1e-5, rtol=0)
    assert 1 / limit * (1 - 1e-4) <= scale.min() < 1.1 / limit
    assert 0.9 * limit < scale.max() <= limit * (1 + 1e-4)
    alike = ((scale[:, 0] - scale[:, 1]).abs() < 1e-4).float().mean()
    assert alike == 1 if key == "rope_rescale_coords" else alike < 0.1


def test_evaluation_and_momentum_copies_draw_nothing() -> None:
    net, x = network(**BOX), images(16, 16)
    plain = network().eval()(x).pooled
    teacher = ema_copy(net)
    assert net.training
    assert teacher.training
    torch.testing.assert_close(teacher(x).pooled, plain)
    torch.testing.assert_close(net.eval()(x).pooled, plain)
    assert not torch.allclose(net.train()(x).pooled, plain)


def test_the_step_gives_its_seed_to_the_backbone_and_the_gradient_has_the_draws_of_the_loss() -> None:
    net, kept, x = network(**BOX), network(**BOX), images(16, 16)
    checkpoint_blocks(kept.model)
    hidden = torch.zeros(3, 4, 4, dtype=torch.bool)
    hidden[:, 1:3, 1:] = True
    slopes = []
    for each in (net, kept):
        each.draw, token = 5, torch.ones(1, 24, requires_grad=True)
        loss = each(x, Hidden(hidden, token)).patches.square().sum()
        slopes.append(torch.autograd.grad(loss, [token, each.model.patch_embed.proj.weight]))
    for ours, want in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, want)


def test_other_transformers_have_no_such_positions() -> None:
    assert rotary(network().model)
    with torch.device("meta"):
        for name in ("vit_tiny_patch16_224", "eva02_tiny_patch14_224"):
            assert not rotary(Backbone(name).model)
