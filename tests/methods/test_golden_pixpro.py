"""PixPro against its authors' code, github.com/zdaxie/PixPro."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch, whole_boxes
from eagleray.methods.pixpro import PixPro, consistency, near, propagate
from eagleray.models.backbone import Backbone

AT = Progress(step=3, steps_per_epoch=10, epochs=2)
WHOLE = torch.tensor([[0.0, 0.0, 1.0, 1.0]])


def batch_of(*views: Tensor, boxes: Tensor | None = None) -> Batch:
    boxes = whole_boxes(views) if boxes is None else boxes
    return Batch([*views], index=torch.empty(0), label=torch.empty(0), rows=(len(views[0]),), boxes=boxes)


class Stored(nn.Module):
    """A head that returns the patches (B, N, C) of recorded maps (B, C, H, W), one after the other."""

    def __init__(self, *maps: Tensor) -> None:
        super().__init__()
        self.maps = [x.flatten(2).mT for x in maps]

    def forward(self, _: Tensor) -> Tensor:
        return self.maps.pop(0)


@cases("pixpro_loss")
def test_step(case: Case) -> None:
    """The heads are replaced by the maps recorded in the golden vector."""
    h, weight = case.hyper, case.hyper["instance_weight"]
    x = [case[name].requires_grad_() for name in ("x1", "x2")]
    settings: dict[str, Any] = {name: h[name] for name in ("sharpness", "distance", "instance_weight")}
    method = PixPro(vit(8, 8, 24, depth=1, heads=3), dim=x[0].shape[1], hidden=8, **settings)
    method.online.patch_head, method.target.patch_head = Stored(*x), Stored(case["t1"], case["t2"])
    if weight:
        p = [case[name].requires_grad_() for name in ("p1", "p2")]
        method.online.instance_head, method.predictor = nn.Identity(), Stored(*p)
        method.target.instance_head = Stored(case["z1"], case["z2"])
    method.transform.weight.data, method.transform.bias.data = case["transform_weight"], case["transform_bias"]

    rows, columns = h["grid"]
    images = torch.zeros(2, len(x[0]), 3, 8 * rows, 8 * columns)
    out = method(batch_of(*images, boxes=case["boxes"]), AT)
    out["loss"].backward()
    case.check(out["loss"], "loss")
    case.check(out["pixel"] if weight else out["loss"], "loss_pixel")
    for i in (0, 1):
        case.check(x[i].grad, f"grad_x{i + 1}")
        if weight:
            case.check(p[i].grad, f"grad_p{i + 1}")
    case.check(method.transform.weight.grad, "grad_transform_weight")
    case.check(method.transform.bias.grad, "grad_transform_bias")


@cases("pixpro_loss")
def test_pairs(case: Case) -> None:
    grid = tuple(case.hyper["grid"])
    pairs = near(case["boxes"], (grid, grid), case.hyper["distance"])
    assert torch.equal(pairs, case["pairs"])
    assert torch.equal(near(case["boxes"].flip(0), (grid, grid), case.hyper["distance"]), pairs.mT)


def test_views_of_one_place_pair_each_patch_with_itself() -> None:
    """Below the distance of neighbours, a side of a square patch or 1 / sqrt(2) of its diagonal."""
    assert torch.equal(near(torch.stack([WHOLE, WHOLE]), ((4, 4), (4, 4)), 0.7), torch.eye(16)[None])
    assert near(torch.stack([WHOLE, WHOLE]), ((4, 4), (4, 4)), 0.72).sum() == 16 + 2 * 2 * 3 * 4


def test_a_flipped_view_is_read_from_right_to_left() -> None:
    pairs = near(torch.stack([WHOLE, WHOLE[:, [2, 1, 0, 3]]]), ((3, 4), (3, 4)), 0.5)
    assert torch.equal(pairs[0].argmax(1), torch.arange(12).view(3, 4).flip(1).flatten())


def test_a_patch_pairs_with_those_inside_of_it() -> None:
    """The second view is the lower right quarter of the first."""
    quarter = torch.tensor([[0.5, 0.5, 1.0, 1.0]])
    pairs = near(torch.stack([WHOLE, quarter]), ((4, 4), (2, 2)), 0.5)
    assert pairs[0].nonzero().tolist() == [[10, 0], [11, 1], [14, 2], [15, 3]]


def test_without_pairs_there_is_no_loss_and_no_gradient() -> None:
    y, t = torch.randn(2, 3, 4, 5).requires_grad_().unbind()
    loss = consistency(y, t, torch.zeros(3, 4, 4))
    assert loss == 0
    assert torch.autograd.grad(loss, y)[0].abs().sum() == 0


def test_patches_that_are_all_alike_agree() -> None:
    x = torch.randn(3, 1, 5).expand(-1, 4, -1)
    y = propagate(x, x, 2.0)
    torch.testing.assert_close(y, 4 * F.normalize(x, dim=2))
    torch.testing.assert_close(consistency(y, 3 * x, torch.ones(3, 4, 4)), torch.tensor(-2.0))


def test_patches_that_differ_are_left_as_they_are() -> None:
    x = torch.eye(4)[None] * torch.tensor([0.1, 1.0, 10.0, 3.0]).view(1, 4, 1)
    torch.testing.assert_close(propagate(x, x, 2.0), torch.eye(4)[None])
    torch.testing.assert_close(propagate(torch.cat([x, -x], 1), torch.cat([x, x], 1), 2.0)[0, :4], torch.eye(4))


def test_momentum_is_that_of_the_authors() -> None:
    momentum, steps = PixPro(vit(8, 8, 24, depth=1, heads=3), dim=4, hidden=8).momentum, AT.steps_per_epoch * 2
    for step in range(steps):
        want = 1 - (1 - 0.99) * (math.cos(math.pi * step / steps) + 1) / 2
        assert momentum(Progress(step, AT.steps_per_epoch, 2)) == pytest.approx(want, abs=1e-12)


SWIN = {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2]}


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize(
    "backbone",
    [
        lambda: vit(32, 8, 24, depth=1, heads=3),
        lambda: Backbone("swin_tiny_patch4_window7_224", options=SWIN),
        lambda: Backbone("resnet10t", options={"channels": (4, 8, 8, 16), "stem_width": 4}),
    ],
    ids=["vit", "swin", "resnet"],
)
def test_any_grid(backbone: Callable[[], Backbone], weight: float) -> None:
    torch.manual_seed(0)
    method = PixPro(backbone(), dim=8, hidden=16, instance_weight=weight, momentum=Schedule(value=0.9))
    out = method(batch_of(*torch.randn(2, 4, 3, 64, 64)), AT)
    out["loss"].backward()
    trained = {n.partition(".")[0] for n, p in method.named_parameters() if p.grad is not None}
    assert trained == {"online", "transform"} | ({"predictor"} if weight else set())
    assert (out.keys() == {"loss"}) is (weight == 0)
    assert not any(n.startswith(("predictor", "online.instance_head")) for n, _ in method.named_parameters()) or weight


def test_targets_are_of_the_momentum_encoder_after_it_moved() -> None:
    method = PixPro(vit(16, 8, 24, depth=1, heads=3), dim=8, hidden=16, momentum=Schedule(value=0.0))
    for p in method.target.parameters():
        p.mul_(1.5)
    method(batch_of(*torch.randn(2, 4, 3, 16, 16)), AT)
    for p, q in zip(method.target.parameters(), method.online.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_layer_after_the_pooling_gets_a_gradient() -> None:
    net = Backbone("convnext_atto", options={"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)})
    method = PixPro(net, dim=8, hidden=16)
    method.loss([torch.randn(2, 3, 64, 64) for _ in range(2)]).backward()
    assert not [n for n, p in method.named_parameters() if p.requires_grad and p.grad is None]
