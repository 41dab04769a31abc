"""SwAV against lightly's loss, itself checked against the authors' code, github.com/facebookresearch/swav."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.losses.sinkhorn import sinkhorn
from eagleray.methods import swav
from eagleray.methods.swav import SwAV, swapped_loss


def cosines(rows: int, prototypes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    z, c = (F.normalize(torch.randn(n, 8, generator=generator), dim=1) for n in (rows, prototypes))
    return z @ c.T


def small(**keys: Any) -> SwAV:
    torch.manual_seed(0)
    backbone = vit(16, 8, 24, depth=1, heads=3)
    return SwAV(backbone, **{"dim": 8, "hidden": 16, "prototypes": 10, **keys})


def batch(step: int = 0, rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(step)
    views = [torch.randn(rows, 3, size, size, generator=generator) for size in (16, 16, 8)]
    return Batch(views, index=torch.empty(0), label=torch.empty(0), rows=(rows,))


def at(step: int) -> Progress:
    return Progress(step, steps_per_epoch=3, epochs=9)


def on_ranks(world: int, of_rank: Callable[[int], Any], patch: pytest.MonkeyPatch) -> list[Any]:
    """Return the result of each rank; the ranks are threads."""
    here, barrier, slots = threading.local(), threading.Barrier(world, timeout=30), [torch.empty(0)] * world

    def all_gather(out: Tensor, own: Tensor) -> None:
        slots[here.rank] = own
        barrier.wait()
        out.copy_(torch.cat(slots))
        barrier.wait()

    def run(rank: int) -> Any:
        here.rank = rank
        return of_rank(rank)

    with patch.context() as m, ThreadPoolExecutor(world) as pool:
        m.setattr(dist, "size", lambda: world)
        m.setattr(dist, "rank", lambda: here.rank)
        m.setattr(dist.dist, "all_gather_into_tensor", all_gather)
        return list(pool.map(run, range(world)))


@pytest.mark.parametrize("iterations", [1, 3])
def test_every_sample_is_assigned_once(iterations: int) -> None:
    q = sinkhorn(cosines(12, 5), 0.05, iterations)
    torch.testing.assert_close(q.sum(1), torch.ones(12))
    assert (q >= 0).all()


def test_prototypes_are_used_equally() -> None:
    scores = cosines(40, 5) + torch.tensor([0.3, 0, 0, 0, 0])  # one prototype that all like
    greedy = (scores / 0.05).softmax(1).sum(0)
    torch.testing.assert_close(sinkhorn(scores, 0.05, 300).sum(0), torch.full((5,), 40 / 5), rtol=1e-3, atol=0)
    assert (sinkhorn(scores, 0.05, 3).sum(0) - 8).abs().max() < 0.2 * (greedy - 8).abs().max()


def test_how_much_all_like_a_prototype_does_not_matter() -> None:
    scores = cosines(12, 5)
    liked = scores + torch.tensor([0.5, -1, 0, 30, -30])
    torch.testing.assert_close(sinkhorn(liked, 0.05, 3), sinkhorn(scores, 0.05, 3), rtol=1e-3, atol=1e-5)


def test_a_small_epsilon_neither_overflows_nor_leaves_a_row_of_zeros() -> None:
    scores = cosines(12, 5)
    scores[0] -= 1  # a sample that fits no prototype well
    torch.testing.assert_close(sinkhorn(scores, 0.002, 3).sum(1), torch.ones(12))


def test_assignments_carry_no_gradient() -> None:
    assert not sinkhorn(cosines(6, 5).requires_grad_(), 0.05, 3).requires_grad


def test_ranks_assign_together_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, rows = cosines(12, 5), (7, 3, 2)
    parts = on_ranks(3, lambda rank: sinkhorn(scores.split(rows)[rank], 0.05, 3), monkeypatch)
    torch.testing.assert_close(torch.cat(parts), sinkhorn(scores, 0.05, 3))
    alone = torch.cat([sinkhorn(part, 0.05, 3) for part in scores.split(rows)])
    assert (alone - torch.cat(parts)).abs().max() > 0.1


def test_queue_counts_once_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains three steps, of which the last uses a full queue with unequal shares."""
    rows = (5, 3)
    z = F.normalize(torch.randn(3, sum(rows), 8, generator=torch.Generator().manual_seed(0)), dim=2)

    def assigned(own: slice, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        method = SwAV(backbone, dim=8, hidden=16, prototypes=5, queue=13, queue_start=0)
        method.load_state_dict(state)
        for step in range(3):
            q = method.assign(1, z[step, own], method.prototypes(z[step, own]).detach(), rows, at(step))
        return q, method.queues[1].keys

    backbone = vit(16, 8, 24, depth=1, heads=3)
    state = SwAV(backbone, dim=8, hidden=16, prototypes=5, queue=13).state_dict()
    want, keys = assigned(slice(None), (sum(rows),))
    parts = on_ranks(2, lambda rank: assigned(slice(5) if rank == 0 else slice(5, None), rows), monkeypatch)
    torch.testing.assert_close(torch.cat([q for q, _ in parts]), want)
    for _, own in parts:
        assert torch.equal(own, keys)


def test_queue_joins_when_it_is_full_of_what_came_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []

    def spy(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
        joined.append(scores)
        return sinkhorn(scores, epsilon, iterations)

    monkeypatch.setattr(swav, "sinkhorn", spy)
    method, seen = small(queue=8, queue_start=2.0), []
    for step in range(10):  # starts at step 6, has two batches of 4 at step 8
        method(batch(step), at(step))
        seen.append(F.normalize(method.encoder(batch(step).views), dim=1).detach().chunk(3)[1])
    assert [len(scores) for scores in joined[1::2]] == [4] * 8 + [12] * 2
    old = method.prototypes(torch.cat(seen[7:9])).detach()  # what the last step's queue of the second crop held
    torch.testing.assert_close(joined[-1][4:].sort(0).values, old.sort(0).values)


def test_only_full_crops_assign_and_all_others_predict() -> None:
    method, b = small(), batch()
    before = method.prototypes.weight.detach().clone()
    out = method(b, at(0))
    z = F.normalize(method.encoder(b.views), dim=1)
    s1, s2, s3 = (z @ F.normalize(before, dim=1).T).chunk(3)
    q1, q2 = (sinkhorn(s, 0.05, 3) for s in (s1, s2))

    def entropy_of(q: Tensor, s: Tensor) -> Tensor:
        return -(q * (s / 0.1).softmax(1).log()).sum(1).mean()

    pairs = [entropy_of(q1, s2), entropy_of(q1, s3), entropy_of(q2, s1), entropy_of(q2, s3)]
    torch.testing.assert_close(out["loss"], torch.stack(pairs).mean())
    assert 0 < out["entropy"] < out["usage"] <= 1


def test_prototypes_are_of_unit_length_and_still_at_first() -> None:
    method = small(freeze_prototypes=2)
    assert not torch.allclose(method.prototypes.weight.norm(dim=1), torch.ones(10), atol=1e-3)
    for step in range(3):
        method.zero_grad()
        method(batch(step), at(step))["loss"].backward()
        torch.testing.assert_close(method.prototypes.weight.norm(dim=1), torch.ones(10))
        method.before_step(at(step))
        assert (method.prototypes.weight.grad is None) == (step < 2)
        assert all(p.grad is not None for n, p in method.named_parameters() if n != "prototypes.weight")


def test_projector_has_batch_norm_or_none() -> None:
    for norm in (True, False):
        head = small(norm=norm).encoder.head
        assert [layer.bias is not None for layer in head if isinstance(layer, nn.Linear)] == [True, True]
        assert sum(isinstance(layer, nn.BatchNorm1d) for layer in head) == norm


@cases("swav_loss")
def test_loss(case: Case) -> None:
    h = case.hyper
    high = [case[f"high{i}"].requires_grad_() for i in range(case.count("high{}"))]
    low = [case[f"low{i}"].requires_grad_() for i in range(case.count("low{}"))]
    q = [sinkhorn(s, h["epsilon"], h["iterations"]) for s in high]
    loss = swapped_loss(q, high + low, h["temperature"])
    loss.backward()
    for i, qi in enumerate(q):
        case.check(qi, f"q{i}")
    case.check(loss, "loss")
    for name, crops in {"high": high, "low": low}.items():
        for i, s in enumerate(crops):
            case.check(s.grad, f"grad_{name}{i}")


@cases("swav_queue")
def test_queue(case: Case) -> None:
    h = case.hyper
    high = [case[f"high{i}"].requires_grad_() for i in range(case.count("high{}"))]
    joined = [torch.cat([s.detach(), case[f"queue{i}"]]) for i, s in enumerate(high)]
    q = [sinkhorn(j, h["epsilon"], h["iterations"])[: len(s)] for s, j in zip(high, joined, strict=True)]
    loss = swapped_loss(q, high, h["temperature"])
    loss.backward()
    case.check(loss, "loss")
    for i, s in enumerate(high):
        case.check(s.grad, f"grad_high{i}")
