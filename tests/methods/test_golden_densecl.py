"""DenseCL against its authors' code, github.com/WXinlong/DenseCL."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.methods.densecl import DenseCL, match_keys
from eagleray.models.backbone import Backbone

AT = Progress(step=3, steps_per_epoch=10, epochs=2)


def batch_of(*views: Tensor) -> Batch:
    return Batch([*views], index=torch.empty(0), label=torch.empty(0), rows=(len(views[0]),))


@cases("densecl_loss")
def test_step(case: Case) -> None:
    """The encoders are replaced by the outputs recorded in the golden vector."""
    h, q, grid = case.hyper, case["q"].requires_grad_(), case["q_grid"].requires_grad_()
    f, g = (case[name].flatten(2).mT for name in ("q_backbone", "k_backbone"))
    settings: dict[str, Any] = {"temperature": h["temperature"], "dense_weight": h["loss_lambda"], "queue": h["queue"]}
    method = DenseCL(vit(16, 8, 24, depth=1, heads=3), dim=q.shape[1], hidden=8, **settings)
    method.f_q.encode = lambda _: (q, grid.mT, f)
    method.f_k.encode = lambda _: (case["k"], case["k_grid"].mT, g)
    method.queue.keys.copy_(case["queue"])
    method.dense_queue.keys.copy_(case["queue_dense"])

    loss = method(batch_of(*torch.zeros(2, len(q), 3, 16, 16)), AT)["loss"]
    loss.backward()
    case.equal(loss, case["loss_global"] + case["loss_dense"], "loss")
    case.check(q.grad, "grad_q")
    case.check(grid.grad, "grad_q_grid")
    case.check(method.queue.keys, "queue_after")
    case.check(method.dense_queue.keys, "queue_dense_after")


@cases("densecl_loss")
def test_loss(case: Case) -> None:
    tau, share = case.hyper["temperature"], case.hyper["loss_lambda"]
    q, k, s, t = (F.normalize(case[name], dim=1) for name in ("q", "k", "q_grid", "k_grid"))
    f, g = (case[name].flatten(2).mT for name in ("q_backbone", "k_backbone"))
    case.check((1 - share) * infonce(logits(q, k, case["queue"], tau)), "loss_global")
    s, t = s.mT.flatten(0, 1), match_keys(t.mT, f, g).flatten(0, 1)
    case.check(share * infonce(logits(s, t, case["queue_dense"], tau)), "loss_dense")


def test_patches_that_moved_are_found() -> None:
    f, t = torch.randn(3, 30, 7), torch.randn(3, 30, 5)
    order = torch.stack([torch.randperm(30) for _ in range(3)]).unsqueeze(2)
    length = 0.1 + torch.rand(3, 30, 1)  # does not count
    g = (f * length).take_along_dim(order, 1)
    assert torch.equal(match_keys(t.take_along_dim(order, 1), f, g), t)


def test_several_patches_may_share_a_key() -> None:
    g, t = torch.randn(1, 4, 7), torch.randn(1, 4, 5)
    assert torch.equal(match_keys(t, g[:, [2, 2, 0]], g), t[:, [2, 2, 0]])


SWIN = {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2]}


@pytest.mark.parametrize(
    "backbone",
    [
        lambda: vit(32, 8, 24, depth=1, heads=3),
        lambda: Backbone("swin_tiny_patch4_window7_224", options=SWIN),
        lambda: Backbone("resnet50"),
    ],
    ids=["vit", "swin", "resnet50"],
)
def test_any_grid(backbone: Any) -> None:
    torch.manual_seed(0)
    method = DenseCL(backbone(), dim=8, hidden=16, queue=20, momentum=Schedule(value=0.9))
    pooled: list[Tensor] = []
    method.f_q.head.register_forward_pre_hook(lambda _, args: pooled.append(args[0]))
    out = method(batch_of(*torch.randn(2, 4, 3, 64, 64)), AT)
    out["loss"].backward()
    assert [tuple(x.shape) for x in pooled] == [(4, method.export().dim)]
    assert {n.partition(".")[0] for n, p in method.named_parameters() if p.grad is not None} == {"f_q"}
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in method.f_q.dense_head.parameters())


def test_keys_are_of_the_momentum_encoder_after_it_moved() -> None:
    backbone, still = vit(16, 8, 24, depth=1, heads=3), Schedule(value=0.0)  # the keys' encoder becomes the queries'
    method, x = DenseCL(backbone, dim=8, hidden=16, queue=20, momentum=still), torch.randn(4, 3, 16, 16)
    for p in method.f_k.parameters():
        p.mul_(1.5)
    q, s, _ = method.f_q.encode(x)
    method(batch_of(x, x), AT)
    torch.testing.assert_close(method.queue.keys[:, :4], F.normalize(q, dim=1).T)
    torch.testing.assert_close(method.dense_queue.keys[:, :4], F.normalize(s.mean(1), dim=1).T)


@pytest.mark.parametrize(("weight", "silent"), [(0.0, "dense_head"), (1.0, "head")])
def test_weight_between_patches_and_image(weight: float, silent: str) -> None:
    method = DenseCL(vit(16, 8, 24, depth=1, heads=3), dim=8, hidden=16, queue=20, dense_weight=weight)
    method(batch_of(*torch.randn(2, 4, 3, 16, 16)), AT)["loss"].backward()
    for name in ("head", "dense_head"):
        total = sum(p.grad.abs().sum() for p in getattr(method.f_q, name).parameters())
        assert (total == 0) == (name == silent)


def test_heads_of_patches_and_image_are_two() -> None:
    method = DenseCL(vit(16, 8, 24, depth=1, heads=3), dim=8, hidden=16, queue=20)
    one, two = method.f_q.head, method.f_q.dense_head
    assert [type(m) for m in two] == [nn.Linear, nn.ReLU, nn.Linear]
    assert not {id(p) for p in one.parameters()} & {id(p) for p in two.parameters()}
