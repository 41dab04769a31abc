"""InstDisc against the authors' code, github.com/zhirongw/lemniscate.pytorch."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases, vit
from torch import Tensor

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.losses.nce import estimate_Z, exp_similarity, nce
from eagleray.methods.instdisc import InstDisc, proximal_term
from eagleray.models.queue import Bank, draw_negatives

CPU = torch.device("cpu")
IMAGES = 20


def small(**keys: float) -> InstDisc:
    torch.manual_seed(0)
    method = InstDisc(vit(16, 8, 24, depth=1, heads=3), dim=8, **{"negatives": 6, **keys})
    method.allocate(IMAGES)
    return method


def batch(step: int = 0, rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(rows, 3, 16, 16, generator=generator)
    index = torch.randperm(IMAGES, generator=generator)[:rows]
    return Batch([images], index=index, label=torch.empty(0), rows=(rows,))


def at(step: int) -> Progress:
    return Progress(step, steps_per_epoch=5, epochs=2)


def rows_of(method: InstDisc) -> Tensor:
    assert method.bank is not None
    return method.bank.rows


def test_what_cannot_be_told_from_noise_costs_a_coin_toss_each() -> None:
    n, negatives = 50, 7
    P = torch.full((3, 1 + negatives), negatives / n)
    assert float(nce(P, n)) == pytest.approx((1 + negatives) * math.log(2), rel=1e-4)


def test_estimated_probabilities_average_to_one_in_n() -> None:
    e = torch.rand(5, 9) + 0.1
    P = e / estimate_Z(e, 40, (5,))
    assert float(P.mean()) == pytest.approx(1 / 40)


def test_constant_is_of_the_rows_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    e = torch.rand(8, 5)
    whole = estimate_Z(e, 40, (8,))
    monkeypatch.setattr(dist, "total", lambda x: x + e[3:].sum())
    torch.testing.assert_close(estimate_Z(e[:3], 40, (3, 5)), whole)


def test_ranks_share_out_the_negatives_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = draw_negatives(1000, 6, (8,), 3, CPU)
    monkeypatch.setattr(dist, "size", lambda: 2)
    parts = []
    for rank in range(2):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        parts.append(draw_negatives(1000, 6, (3, 5), 3, CPU))
    assert [len(part) for part in parts] == [3, 5]
    assert torch.equal(torch.cat(parts), one)


def test_negatives_are_uniform_over_all_images_and_new_at_every_step() -> None:
    drawn = draw_negatives(5, 20000, (1,), 0, CPU)
    assert torch.bincount(drawn.flatten(), minlength=5).float().std() < 200  # 4000 each; the standard deviation is 57
    assert not torch.equal(drawn, draw_negatives(5, 20000, (1,), 1, CPU))


def test_constant_stays_as_the_first_batch_gave_it() -> None:
    method = small()
    n, tau = IMAGES, method.temperature
    for step in range(3):
        b, before = batch(step), rows_of(method).clone()
        v = F.normalize(method.encoder(b.views), dim=1)
        i = torch.cat([b.index.unsqueeze(1), draw_negatives(n, 6, b.rows, step, CPU)], 1)
        estimate = estimate_Z(exp_similarity(v, before[i], tau), n, b.rows)
        loss = method(b, at(step))["loss"]
        method.after_step(at(step))
        if step == 0:
            first = estimate.clone()
        else:
            assert not torch.isclose(estimate, first)
        torch.testing.assert_close(method.Z, first)
        torch.testing.assert_close(loss, nce(exp_similarity(v, before[i], tau) / first, n))


@pytest.mark.parametrize("negatives", [6, 0])
def test_a_step_moves_the_rows_of_the_batch_alone(negatives: int) -> None:
    method, b = small(negatives=negatives, momentum=0.25), batch()
    before = rows_of(method).clone()
    v = F.normalize(method.encoder(b.views), dim=1)
    method(b, at(0))["loss"].backward()  # it would fail on a bank that has moved
    assert torch.equal(rows_of(method), before)
    method.after_step(at(0))
    moved = 0.25 * before[b.index] + 0.75 * v
    torch.testing.assert_close(rows_of(method)[b.index], moved / moved.norm(dim=1, keepdim=True))
    others = [i for i in range(IMAGES) if i not in b.index.tolist()]
    assert torch.equal(rows_of(method)[others], before[others])


def test_rows_of_all_ranks_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    b = batch(rows=4)
    one, two = small(), small()
    one(b, at(0))
    one.after_step(at(0))
    v = F.normalize(two.encoder(b.views), dim=1)
    monkeypatch.setattr(dist, "gather", lambda x, rows: (v if x.is_floating_point() else b.index).detach())
    share = Batch([b.views[0][:3]], b.index[:3], b.label, (3, 1))
    two(share, at(0))
    two.after_step(at(0))
    torch.testing.assert_close(rows_of(two), rows_of(one))


@pytest.mark.parametrize("negatives", [6, 0])
def test_proximal_term_is_added(negatives: int) -> None:
    b, plain, held = batch(), small(negatives=negatives), small(negatives=negatives, proximal=30.0)
    v = F.normalize(plain.encoder(b.views), dim=1)
    added = 30 * (v - rows_of(plain)[b.index]).square().sum(1).mean()
    torch.testing.assert_close(held(b, at(0))["loss"], plain(b, at(0))["loss"] + added)


def test_softmax_over_all_images_is_the_cross_entropy_of_the_own_one() -> None:
    method, b = small(negatives=0, temperature=0.2), batch()
    v = F.normalize(method.encoder(b.views), dim=1)
    p = torch.exp(v @ rows_of(method).T / 0.2)
    own = p[torch.arange(len(v)), b.index] / p.sum(1)
    torch.testing.assert_close(method(b, at(0))["loss"], -own.log().mean())


def test_without_allocate_it_says_so() -> None:
    method = InstDisc(vit(16, 8, 24, depth=1, heads=3), dim=8)
    with pytest.raises(AssertionError, match="allocate"):
        method(batch(), at(0))


@cases("instdisc_nce")
def test_nce(case: Case) -> None:
    h, x, memory = case.hyper, case["x"].requires_grad_(), case["memory_before"]
    n = h["n_data"]
    e = exp_similarity(x, memory[case["idx"]], h["temperature"])
    P = e / case["Z"]
    loss = nce(P, n)
    loss.backward()
    case.check(P, "prob")
    case.check(loss, "loss")
    case.check(x.grad, "grad_x")
    if torch.isclose(case["prob"].mean() * n, torch.ones(()), rtol=1e-3):  # then it is this batch that gave Z
        case.check(estimate_Z(e, n, (len(x),)), "Z")
    check_memory(case)


@cases("instdisc_softmax")
def test_softmax(case: Case) -> None:
    x = case["x"]
    n, dim = case["memory_before"].shape
    method = InstDisc(vit(16, 8, 24, depth=1, heads=3), dim=dim, temperature=case.hyper["temperature"], negatives=0)
    method.allocate(n)
    rows_of(method).copy_(case["memory_before"])
    v = x.clone().requires_grad_()
    method.encoder = Given(v)  # type: ignore[assignment]
    loss = method(Batch([], case["y"], torch.empty(0), (len(x),)), at(0))["loss"]
    loss.backward()
    case.check(loss, "loss")
    # Ours goes back through the normalisation of what is of unit length already: its radial part is gone.
    radial = (case["grad_x"] * x).sum(1, keepdim=True) * x
    case.equal(v.grad, case["grad_x"] - radial, "grad_x")
    method.momentum = case.hyper["memory_momentum"]
    method.after_step(at(0))
    case.check(rows_of(method), "memory_after")


class Given(torch.nn.Module):
    """An encoder that returns a fixed output."""

    def __init__(self, v: Tensor) -> None:
        super().__init__()
        self.v = v

    def forward(self, views: list[Tensor]) -> Tensor:
        return self.v


@cases("instdisc_proximal_formula")
def test_proximal(case: Case) -> None:
    v = case["v"].requires_grad_()
    penalty = case.hyper["lambda"] * proximal_term(v, case["v_prev"])
    penalty.backward()
    case.check(penalty, "penalty")
    case.check(v.grad, "grad_v")


def check_memory(case: Case) -> None:
    y, bank = case["y"], Bank(*case["memory_before"].shape)
    bank.rows.copy_(case["memory_before"])
    bank.move(y, case["x"], case.hyper["memory_momentum"])
    case.check(bank.rows, "memory_after")
