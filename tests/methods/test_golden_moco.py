"""MoCo against its authors' code, github.com/facebookresearch/moco, and solo-learn's."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.methods.moco import MoCo

AT = Progress(step=3, steps_per_epoch=10, epochs=2)


class Flat(nn.Module):
    """A backbone that returns its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def pooled_sizes(self, views: list[Tensor]) -> list[Tensor]:
        return views


def batch_of(*views: Tensor) -> Batch:
    return Batch([*views], index=torch.empty(0), label=torch.empty(0), rows=(len(views[0]),))


@cases("moco_v2_infonce")
def test_loss(case: Case) -> None:
    q = case["q"].requires_grad_()
    loss = infonce(logits(q, case["k"], case["queue"], case.hyper["temperature"]))
    loss.backward()
    case.check(loss, "loss")
    case.check(q.grad, "grad_q")


@cases("moco_v2_queue_step")
def test_step(case: Case) -> None:
    h, (dim, wide) = case.hyper, case["w_q"].shape
    momentum = Schedule(value=h["momentum"])
    method = MoCo(Flat(wide), dim=dim, hidden=None, temperature=h["temperature"], queue=h["queue"], momentum=momentum)
    nn.init.zeros_(method.f_q.head[0].bias)
    nn.init.zeros_(method.f_k.head[0].bias)
    weight = method.f_q.head[0].weight
    weight.data.copy_(case["w_q"])
    method.f_k.head[0].weight.copy_(case["w_k_before"])
    (queue,) = method.queues
    queue.keys.copy_(case["queue_before"])
    queue.next.copy_(case["ptr_before"])

    out = method(batch_of(case["x_q"], case["x_k"]), AT)
    out["loss"].backward()
    case.check(out["loss"], "loss")
    case.check(weight.grad, "grad_w_q")
    case.check(method.f_k.head[0].weight, "w_k_after")
    case.check(queue.keys, "queue_after")
    assert queue.next == case["ptr_after"]
    q, k = (F.normalize(f([case[x]]), dim=1) for f, x in ((method.f_q, "x_q"), (method.f_k, "x_k")))
    case.check(logits(q, k, case["queue_before"], h["temperature"]), "logits")
    case.equal(out["gain"], math.log(case["logits"].shape[1]) - case["loss"], "gain")
    assert all(p.grad is None for p in method.f_k.parameters())


def test_loss_of_keys_that_are_known() -> None:
    axes, tau = torch.eye(12), 0.3
    loss = infonce(logits(axes[:4], axes[:4], axes[:, 5:12], tau))  # the own key, and seven at a right angle
    torch.testing.assert_close(loss, torch.tensor(math.log(1 + 7 * math.exp(-1 / tau))))


def small(**keys: object) -> MoCo:
    torch.manual_seed(0)
    method = MoCo(vit(16, 8, 24, depth=1, heads=3), dim=8, queue=20, momentum=Schedule(value=0.9), **keys)
    for p in method.f_k.parameters():
        p.mul_(1.1)  # another network than that of the queries
    return method


def test_both_directions_are_the_sum_of_each() -> None:
    x1, x2 = torch.randn(2, 6, 3, 16, 16)
    both, one, other = small(hidden=16, symmetric=True), small(hidden=16), small(hidden=16)
    one.queues[0].load_state_dict(both.queues[0].state_dict())
    other.queues[0].load_state_dict(both.queues[1].state_dict())
    losses = [m(batch_of(*v), AT)["loss"] for m, v in ((both, (x1, x2)), (one, (x1, x2)), (other, (x2, x1)))]
    torch.testing.assert_close(losses[0], losses[1] + losses[2])
    assert (losses[1] - losses[2]).abs() > 1e-3
    for mine, alone in zip(both.queues, (one.queues[0], other.queues[0]), strict=True):  # each keeps one view's keys
        torch.testing.assert_close(mine.keys, alone.keys)


@pytest.mark.parametrize(("hidden", "widths"), [(None, [(8, 24)]), (16, [(16, 24), (8, 16)])])
def test_head(hidden: int | None, widths: list[tuple[int, int]]) -> None:
    head = small(hidden=hidden).f_q.head
    linear = [m for m in head if isinstance(m, nn.Linear)]
    assert [tuple(m.weight.shape) for m in linear] == widths
    assert all(m.bias is not None for m in linear)
    assert [type(m) for m in head if m not in linear] == [nn.ReLU] * (len(widths) - 1)


def test_every_trained_parameter_has_a_gradient() -> None:
    method = small(hidden=16)
    method(batch_of(*torch.randn(2, 6, 3, 16, 16)), AT)["loss"].backward()
    assert {n.partition(".")[0] for n, p in method.named_parameters() if p.grad is not None} == {"f_q"}
    assert all(p.grad is not None for p in method.f_q.parameters())
