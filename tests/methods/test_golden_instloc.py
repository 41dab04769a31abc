"""InstLoc against a step that was written from the paper and the authors' code, github.com/limbo0000/InstanceLoc."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.golden_cases import Case, cases, vit
from torch import Tensor
from torchvision.ops import box_iou

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.methods.instloc import InstLoc, near_boxes, neighbours
from eagleray.models.backbone import Backbone
from eagleray.views.pasting import DRAWS, draw_boxes, paste

AT = Progress(step=3, steps_per_epoch=10, epochs=2)
THIN = {"channels": (4, 8, 8, 16), "stem_width": 4}


def batch_of(*views: Tensor) -> Batch:
    return Batch([*views], index=torch.empty(0), label=torch.empty(0), rows=(len(views[0]),))


def small(**settings: Any) -> InstLoc:
    backbone = Backbone("resnet10t", options={"zero_init_last": False, **THIN})
    return InstLoc(backbone, **{"dim": 8, "hidden": 12, "queue": 10, "momentum": Schedule(value=0.9), **settings})


@cases("instloc_loss")
def test_step(case: Case) -> None:
    names = ("temperature", "dim", "hidden", "queue", "side", "smallest", "overlap")
    settings = {name: case.hyper[name] for name in names}
    method = small(**settings, momentum=Schedule(value=case.hyper["momentum"])).double()
    for network, prefix in ((method.f_q, "q."), (method.f_k, "k.")):
        assert not network.load_state_dict(case.under(prefix), strict=False).unexpected_keys
    method.queue.keys.copy_(case["queue"])
    method.draw = lambda *_: case["u"]  # type: ignore[method-assign]

    loss = method(batch_of(case["view_1"], case["view_2"], case["view_3"]), AT)["loss"]
    loss.backward()
    case.check(loss, "loss")
    case.check(method.queue.keys, "queue_after")
    parameters = dict(method.f_q.named_parameters())
    gradients = case.under("grad.")
    assert len(gradients) > 5
    for name, want in gradients.items():
        case.equal(parameters[name].grad, want, name)


@cases("instloc_loss")
def test_boxes_and_composites(case: Case) -> None:
    u, background = case["u"], case["view_3"]
    size, smallest = background.shape[3], case.hyper["smallest"]
    (boxes, cuts), (others, _) = draw_boxes(u[:, :6], smallest, size), draw_boxes(u[:, 6:12], smallest, size)
    case.check(boxes, "boxes_1")
    case.check(others, "boxes_2")
    case.check(paste(case["view_1"], background.roll(-1, 0), boxes, cuts), "composite_1")
    case.check(near_boxes(boxes, u[:, 12:], case.hyper["overlap"], size), "boxes_query")


def test_boxes_lie_in_the_image_and_have_the_shape_of_their_cuts() -> None:
    boxes, cuts = draw_boxes(torch.rand(4000, DRAWS), 0.5, 256)
    assert boxes.min() >= 0
    assert boxes.max() <= 256
    assert cuts.min() >= 0
    assert cuts.max() <= 1
    w, h = (boxes[:, 2:] - boxes[:, :2]).unbind(1)
    longer, shorter = torch.maximum(w, h), torch.minimum(w, h)
    assert 127 < longer.min() < 140 < 250 < longer.max()
    assert shorter.min() >= 64  # half of the shortest longer side
    cut_w, cut_h = (cuts[:, 2:] - cuts[:, :2]).unbind(1)
    torch.testing.assert_close(torch.maximum(cut_w, cut_h), torch.ones(4000))
    torch.testing.assert_close(w / h, cut_w / cut_h, rtol=0.03, atol=0)  # whole pixels
    assert (w / h).min() < 0.53
    assert (w / h).max() > 1.9


def test_an_anchor_is_near_its_box_and_each_is_chosen() -> None:
    boxes, _ = draw_boxes(torch.rand(2000, DRAWS), 0.5, 256)
    near = near_boxes(boxes, torch.rand(2000, 1), 0.5, 256)
    moved = (near != boxes).any(1)
    assert moved.float().mean() > 0.95
    assert box_iou(boxes, near).diagonal()[moved].min() > 0.5
    same = boxes[:1].expand(len(boxes), 4)
    order = near_boxes(same, torch.linspace(0, 1, 2000).unsqueeze(1), 0.5, 256)
    assert len(order.unique(dim=0)) > 20
    assert torch.equal(near_boxes(boxes, torch.rand(2000, 1), 1.0, 256), boxes)  # no anchor overlaps so much


def test_a_whole_image_is_pasted_as_it_is() -> None:
    image, background = torch.randn(2, 4, 3, 16, 16)
    whole = torch.tensor([[0.0, 0, 16, 16]] * 4)
    torch.testing.assert_close(paste(image, background, whole, whole / 16), image)


def test_the_background_is_another_image() -> None:
    x = torch.arange(5.0)
    assert neighbours(x, (5,), 1).tolist() == [1, 2, 3, 4, 0]
    assert neighbours(x, (5,), -1).tolist() == [4, 0, 1, 2, 3]
    assert neighbours(x[:1], (1,), 1).tolist() == [0]


def test_the_box_alone_reaches_the_last_stage() -> None:
    """Features of a box differ from those of the image, and the exported network is as it was."""
    method, x = small(), torch.randn(4, 3, 64, 64)
    backbone = method.export()
    whole, box = torch.tensor([[0.0, 0, 64, 64]] * 4), torch.tensor([[0.0, 0, 32, 32]] * 4)
    q = [method.f_q.regions(x, b) for b in (whole, box)]
    assert not torch.allclose(*q)
    assert not any(m._forward_hooks for m in backbone.modules())
    seen = [method.f_q.eval().regions(x, box), method.f_q.regions(torch.cat([x[:3], x[:1]]), box)]
    torch.testing.assert_close(seen[0][:3], seen[1][:3])


@pytest.mark.parametrize(
    "backbone",
    [
        lambda: vit(32, 8, 24, depth=1, heads=3),
        lambda: Backbone("swin_tiny_patch4_window7_224"),
        lambda: Backbone("pvt_v2_b0"),
    ],
    ids=["vit", "swin", "pvt"],
)
def test_other_backbones_are_refused_in_one_line(backbone: Any) -> None:
    with pytest.raises(UserError, match=r"^backbone\.name: expected a CNN with stages[^\n]*; got a \w+$"):
        InstLoc(backbone())


def test_steps_draw_other_boxes_and_a_step_draws_the_same() -> None:
    method, batch = small(), batch_of(*torch.randn(3, 4, 3, 32, 32))
    drawn = [method.draw(batch, Progress(step, 10, 2)) for step in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1])
    assert all(not torch.equal(x, y) for x, y in pairwise(drawn[1:]))
