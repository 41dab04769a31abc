"""MoBY against the authors' code, github.com/SwinTransformer/Transformer-SSL."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.methods.moby import MoBY


def batch_of(*views: Tensor) -> Batch:
    return Batch([*views], index=torch.empty(0), label=torch.empty(0), rows=(len(views[0]),))


@cases("moby_contrastive_loss")
def test_one_direction(case: Case) -> None:
    q = case["q"].requires_grad_()
    loss = infonce(logits(q, case["k"], case["queue"], case.hyper["temperature"]))
    loss.backward()
    case.check(loss, "loss")
    case.check(q.grad, "grad_q")


class Given(nn.Module):
    """A network that returns fixed outputs, one per call."""

    def __init__(self, *outputs: Tensor) -> None:
        super().__init__()
        self.outputs = [*outputs]
        self.moved = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, _: object) -> Tensor:
        return self.outputs.pop(0)

    def each(self, views: list[Tensor]) -> list[Tensor]:
        return [self(view) for view in views]


@cases("moby_loss")
def test_loss(case: Case) -> None:
    dim, length = case["queue1"].shape
    method = small(dim=dim, queue=length, temperature=case.hyper["temperature"])
    q1, q2 = case["pred1"].requires_grad_(), case["pred2"].requires_grad_()
    method.predictor, method.target = Given(q1, q2), Given(case["key1"], case["key2"])
    method.online = Given(q1, q2)
    for queue, name in ((method.queue1, "queue1"), (method.queue2, "queue2")):
        queue.keys.copy_(case[name])
    out = method(batch_of(q1, q2), AT)
    out["loss"].backward()
    case.check(out["loss"], "loss")
    # Of unit vectors, as the predictions are: the gradient has no part along them.
    for q, name in ((q1, "grad_pred1"), (q2, "grad_pred2")):
        g = case[name]
        case.equal(q.grad, g - (g * q).sum(1, keepdim=True) * q, name)


class Small(nn.Module):
    """The network with which the authors' steps were recorded: LayerNorm(tanh(Linear(x)))."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dim, wide = case["state0/encoder.fc.weight"].shape
        self.fc, self.ln = nn.Linear(wide, self.dim), nn.LayerNorm(self.dim)

    def pooled(self, x: Tensor) -> Tensor:
        return self.ln(torch.tanh(self.fc(x)))

    def pooled_each(self, views: list[Tensor]) -> list[Tensor]:
        return [self.pooled(x) for x in views]


OURS = {
    "encoder": "online.backbone",
    "encoder_k": "target.backbone",
    "projector": "online.head",
    "projector_k": "target.head",
    "predictor": "predictor",
}
LAYERS = {"linear_hidden.1": "0", "linear_hidden.2": "1", "linear_out": "3"}


def ours(name: str) -> str:
    """Return our name for a parameter or buffer of the authors."""
    part, _, rest = name.partition(".")
    for theirs, number in LAYERS.items():
        rest = rest.replace(theirs, number)
    return f"{OURS[part]}.{rest}"


@cases("moby_full_steps")
def test_steps(case: Case) -> None:
    h = case.hyper
    method = MoBY(
        Small(case),
        dim=h["out_dim"],
        hidden=h["mlp_hidden"],
        temperature=h["temperature"],
        queue=h["queue_len"],
        momentum=Schedule(value=h["momentum"], end=1.0),
    )
    queues = {"queue1": method.queue1, "queue2": method.queue2}
    start = case.under("state0/")
    pointer = start.pop("queue_ptr")
    for name, queue in queues.items():
        queue.keys.copy_(start.pop(name))
        queue.next.copy_(pointer.squeeze())
    missing, unexpected = method.load_state_dict({ours(n): x for n, x in start.items()}, strict=False)
    assert not unexpected
    assert {n.partition(".")[0] for n in missing} <= {*queues}

    lr = float(h["optimizer"].partition("lr=")[2].partition(" ")[0])
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=lr)
    params, epochs = dict(method.named_parameters()), h["epochs"]
    used = []
    for step in range(case.count("step{}/loss")):
        at = Progress(step, h["K_total"] // epochs, epochs)
        used.append(method.momentum(at))
        loss = method(batch_of(case[f"step{step}/x1"], case[f"step{step}/x2"]), at)["loss"]
        optimizer.zero_grad()
        loss.backward()
        case.check(loss, f"step{step}/loss")
        for name, expected in case.under(f"step{step}/grad/").items():
            grad = params[ours(name)].grad
            if name.endswith("linear_hidden.1.bias"):  # which batch norm takes away again: theirs and ours are rounding
                assert max(grad.abs().max(), expected.abs().max()) < 1e-5
            else:  # batch norm over few rows blows rounding up, as is seen in the smallest numbers
                case.near(grad, f"step{step}/grad/{name}")
        optimizer.step()
        for name in case.under(f"step{step}/key/"):
            case.check(params[ours(name)], f"step{step}/key/{name}")
        for name, queue in queues.items():
            case.check(queue.keys, f"step{step}/{name}")
            assert queue.next == case[f"step{step}/queue_ptr"]
    case.check(torch.tensor(used, dtype=torch.float64), "momentum_used")
    for name in case.under("final/"):
        case.check(method.state_dict()[ours(name)], f"final/{name}")


@cases("moby_schedules")
def test_schedules(case: Case) -> None:
    h = case.hyper
    momentum = Schedule(value=h["base_momentum"], end=1.0)
    at = [Progress(k, h["K_total"], 1) for k in case["k"].tolist()]
    case.check(torch.tensor([momentum(a) for a in at], dtype=torch.float64), "momentum")
    lr = Schedule(value=h["base_lr"], warmup_from=h["warmup_lr"], warmup=h["warmup_epochs"], end=h["min_lr"], timm=True)
    steps = [Progress(step, h["niter"], h["epochs"]) for step in range(h["niter"] * h["epochs"])]
    case.check(torch.tensor([lr(a) for a in steps], dtype=torch.float64), "lr_used_at_iteration")


AT = Progress(step=3, steps_per_epoch=10, epochs=2)


def small(**keys: int | float) -> MoBY:
    torch.manual_seed(0)
    sizes = {"dim": 8, "hidden": 16, "queue": 20} | keys
    method = MoBY(vit(16, 8, 24, depth=2, heads=3, drop_path=0.5), **sizes, momentum=Schedule(value=0.75, end=1.0))
    for p in method.target.parameters():
        p.mul_(1.1)  # another network than that of the queries
    return method


def test_an_untrained_guess_gains_nothing_and_a_known_key_all_there_is() -> None:
    method = small(dim=24, queue=7, temperature=0.01)
    axes = torch.eye(24)
    method.predictor, method.target = Given(axes[:4], axes[:4]), Given(axes[:4], axes[:4])
    method.online = Given(axes[:4], axes[:4])
    for queue in (method.queue1, method.queue2):
        queue.keys.copy_(axes[:, 5:12])
    assert method(batch_of(axes[:4], axes[:4]), AT)["gain"] == pytest.approx(math.log(8))


def test_the_queue_of_a_view_keeps_its_keys_and_judges_the_other() -> None:
    method, (x1, x2) = small(), torch.randn(2, 6, 3, 16, 16)
    before = method.queue1.keys.clone(), method.queue2.keys.clone()
    method.eval()  # no path is dropped, so that it can be computed again
    method.predictor.train(), method.online.head.train(), method.target.head.train()
    out = method(batch_of(x1, x2), AT)
    q1, q2 = (F.normalize(method.predictor(method.online([x])), dim=1) for x in (x1, x2))
    k1, k2 = (F.normalize(method.target([x]), dim=1) for x in (x1, x2))
    want = infonce(logits(q1, k2, before[1], 0.2)) + infonce(logits(q2, k1, before[0], 0.2))
    torch.testing.assert_close(out["loss"], want)
    for queue, k, old in ((method.queue1, k1, before[0]), (method.queue2, k2, before[1])):
        torch.testing.assert_close(queue.keys[:, :6], k.T)
        assert torch.equal(queue.keys[:, 6:], old[:, 6:])


def test_the_target_follows_before_its_keys_by_the_step_alone() -> None:
    """The momentum depends on the step alone, so a continued run keeps its schedule."""
    method, again = small(), small()
    views = torch.randn(2, 6, 3, 16, 16)
    start = [p.clone() for p in method.target.parameters()]
    late = Progress(step=15, steps_per_epoch=10, epochs=2)
    for m in (method, again):
        torch.manual_seed(1)
        m(batch_of(*views), late)
    share = 1 - (1 - 0.75) * (1 + math.cos(math.pi * 15 / 20)) / 2
    for old, p, twin, online in zip(
        start, method.target.parameters(), again.target.parameters(), method.online.parameters(), strict=True
    ):
        torch.testing.assert_close(p, share * old + (1 - share) * online)
        assert torch.equal(p, twin)


def test_the_online_network_alone_drops_paths() -> None:
    method, x = small().train(), torch.randn(6, 3, 16, 16)
    assert not torch.equal(method.online.backbone.pooled(x), method.online.backbone.pooled(x))
    assert torch.equal(method.target.backbone.pooled(x), method.target.backbone.pooled(x))


def test_every_trained_parameter_has_a_gradient() -> None:
    method = small()
    method(batch_of(*torch.randn(2, 6, 3, 16, 16)), AT)["loss"].backward()
    named = dict(method.named_parameters())
    assert {n for n, p in named.items() if p.grad is None} == {n for n in named if n.startswith("target.")}
    assert method.export() is method.online.backbone
