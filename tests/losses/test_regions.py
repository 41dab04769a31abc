"""Tests of the region loss: the matches and the squared distance are compared with their definitions."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.losses import regions
from eagleray.losses.prototypes import Match, Scores, match, update_center
from eagleray.losses.regions import match_transport, project_regions, sample_tokens, squared_loss, transport_plan
from eagleray.models.heads import PrototypeHead


def rand(*shape: int, seed: int = 0, **kind: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(**kind)


@pytest.mark.parametrize("matching", regions.MATCHINGS)
def test_shuffled_tokens_are_found_again(matching: str) -> None:
    t = [rand(2, 6, 16, seed=i) for i in range(2)]
    moved = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i)) for i in range(2)])  # (B, N)
    shuffled = [x.gather(1, moved.unsqueeze(-1).expand_as(x)) for x in t]
    teacher, weight = regions.MATCHINGS[matching]([shuffled[1], shuffled[0], shuffled[1][:, :3]], t)
    image = 6 * torch.arange(2).unsqueeze(1)
    first, second, third = teacher.split([12, 12, 6])
    assert torch.equal(first, torch.stack([torch.full((12,), -1), 12 + (image + moved).flatten()], 1))
    assert torch.equal(second, torch.stack([(image + moved).flatten(), torch.full((12,), -1)], 1))
    assert torch.equal(third[:, 1], 12 + (image + moved[:, :3]).flatten())
    torch.testing.assert_close((weight * (teacher >= 0).sum(1)).sum(), torch.tensor(1.0))


def test_transport_leaves_nobody_out_where_the_likest_is_one_for_all() -> None:
    """Each token of x is similar to its own token of y, and even more similar to the first one."""
    y = torch.eye(5).unsqueeze(0)
    x = (0.8 * torch.eye(5) + 1.0 * torch.eye(5)[0]).unsqueeze(0)
    assert match([x, x], [y, y]).teacher.split(5)[0][:, 1].tolist() == [5] * 5
    assert match_transport([x, x], [y, y]).teacher.split(5)[0][:, 1].tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("seed", range(5))
def test_transport_carries_as_much_as_the_best_assignment(seed: int) -> None:
    x, y = rand(1, 5, 8, seed=seed), rand(1, 5, 8, seed=50 + seed)
    cosine = F.normalize(x[0], dim=-1) @ F.normalize(y[0], dim=-1).T
    best = max(float(cosine[range(5), p].sum()) for p in itertools.permutations(range(5)))
    q = transport_plan(x, y)[0]
    torch.testing.assert_close(q.sum(1), torch.ones(5))
    torch.testing.assert_close(q.sum(0), torch.ones(5), atol=0.2, rtol=0)
    assert (q * cosine).sum() > best - 5 * math.log(5) * regions.EPSILON


def test_squared_loss_is_that_of_unit_scores() -> None:
    double = {"dtype": torch.float64}
    s, t, w, u = rand(7, 3, **double), rand(5, 3, seed=1, **double), rand(11, 3, seed=2, **double), rand(11, 3, seed=3)
    teacher = torch.tensor([[0, -1], [1, 2], [-1, 4], [3, 3], [-1, -1], [2, 0], [4, 1]])
    matched = Match(teacher, torch.rand(7, generator=torch.Generator().manual_seed(4), **double))
    u = u.double()
    given = (s.requires_grad_(), w.requires_grad_())
    ours = squared_loss(Scores(t.requires_grad_(), u.requires_grad_()), Scores(*given), matched)
    y_s, y_t = F.normalize(s @ w.T, dim=1), F.normalize(t @ u.T, dim=1).detach()
    far = torch.cdist(y_s, y_t).square()
    want = sum(r * far[i, j] for i, r in enumerate(matched.weight) for j in teacher[i].tolist() if j >= 0)
    torch.testing.assert_close(ours, want)
    torch.testing.assert_close(torch.autograd.grad(ours, given), torch.autograd.grad(want, given))
    assert not torch.autograd.grad(squared_loss(Scores(t, u), Scores(*given), matched), [t], allow_unused=True)[0]


def test_a_sample_is_of_other_tokens_each_time_and_never_twice_the_same() -> None:
    x = torch.arange(16.0).view(1, 16, 1).expand(3, 16, 2)
    generator = torch.Generator().manual_seed(0)
    found = [sample_tokens(x, 5, generator) for _ in range(20)]
    assert {len(set(y[0, :, 0].tolist())) for y in found} == {5}
    assert all(torch.equal(y[0], y[2]) for y in found)
    assert {int(i) for y in found for i in y[0, :, 0]} == set(range(16))
    assert sample_tokens(x, None, generator) is x
    assert sample_tokens(x, 16, generator) is x


def test_the_centre_follows_the_mean_of_the_scores() -> None:
    head, center = PrototypeHead(4, 9, hidden=5, bottleneck=3), rand(9)
    views, w = [rand(2, 3, 4, seed=1), rand(2, 3, 4, seed=2)], head.last.weight
    scores = head.last(head(torch.cat([x.flatten(0, 1) for x in views])))
    t = project_regions(views, head).scores
    torch.testing.assert_close(t.z @ w.T, scores)
    want = 0.7 * center + 0.3 * scores.mean(0)
    update_center(center, t, (2,), 0.7)
    torch.testing.assert_close(center, want)
