"""Tests of the prototype losses: against the plain formula, and against golden vectors of the authors' code."""

import copy
from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import Case, cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagleray.base import dist
from eagleray.losses import entropy
from eagleray.losses.prototypes import Match, cross_entropy, match, mean_scores, probabilities
from eagleray.models.heads import PrototypeHead

without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_gpu])])


class Given:
    """Random rows and prototypes; each student row is matched with up to Q teacher rows."""

    def __init__(self, n: int, m: int, k: int, d: int, q: int = 2, seed: int = 0, **kind: Any) -> None:
        g = torch.Generator().manual_seed(seed)
        rows = lambda count: F.normalize(torch.randn(count, d, generator=g), dim=1).to(**kind)  # noqa: E731
        self.t, self.s, self.w_t, self.w_s = rows(m), rows(n), rows(k), rows(k)
        self.center = (0.1 * torch.randn(k, generator=g)).to(**kind)
        teacher = torch.randint(-1, m, (n, q), generator=g)
        self.matched = Match(teacher.to(self.t.device), torch.rand(n, generator=g).to(**kind))

    def double(self) -> Self:
        """Return the same numbers in float64."""
        out = copy.copy(self)
        out.t, out.s, out.w_t, out.w_s = (x.double() for x in (self.t, self.s, self.w_t, self.w_s))
        out.center, out.matched = self.center.double(), self.matched._replace(weight=self.matched.weight.double())
        return out

    def ours(self, **settings: Any) -> list[Tensor]:
        """Return the loss and both gradients of `cross_entropy`."""
        s, w_s = self.s.clone().requires_grad_(), self.w_s.clone().requires_grad_()
        loss = cross_entropy(self.t, s, self.w_t, w_s, self.center, self.matched, tau_t=0.05, tau_s=0.1, **settings)
        (3 * loss).backward()
        return [loss.detach(), s.grad, w_s.grad]

    def plain(self) -> list[Tensor]:
        """Return the loss and both gradients of the formula, with all scores in memory."""
        s, w_s = self.s.clone().requires_grad_(), self.w_s.clone().requires_grad_()
        loss = plain(self.t, s, self.w_t, w_s, self.center, self.matched)
        (3 * loss).backward()
        return [loss.detach(), s.grad, w_s.grad]


def plain(t: Tensor, s: Tensor, w_t: Tensor, w_s: Tensor, center: Tensor, matched: Match) -> Tensor:
    p = F.softmax((t @ w_t.T - center) / 0.05, dim=1)
    log_p = F.log_softmax(s @ w_s.T / 0.1, dim=1)
    targets = [p[rows] * (rows >= 0).unsqueeze(1) for rows in matched.teacher.unbind(1)]
    return -(matched.weight * (sum(targets) * log_p).sum(1)).sum()


def assert_near(ours: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Check the norm of each difference, as a share of the norm of what is expected."""
    for x, y in zip(ours, expected, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y.double()).norm() < tolerance * y.double().norm()


@on_both
@pytest.mark.parametrize(("n", "m", "k", "d", "q"), [(7, 5, 65536, 16, 2), (61, 13, 1009, 7, 3), (5, 3, 2, 1, 1)])
def test_equals_the_plain_loss(device: str, n: int, m: int, k: int, d: int, q: int) -> None:
    given = Given(n, m, k, d, q, device=device)
    exact = given.double().plain()
    for chunk in (None, 3 * k, 1):
        assert_near(given.double().ours(chunk=chunk), exact, 1e-12)
        # W^T p adds K numbers of both signs, so float32 loses up to sqrt(K) roundings: 3e-5 for K = 65536. How much it
        # loses depends on the order in which the processor's matrix product adds them up.
        assert_near(given.ours(chunk=chunk), exact, max(1e-5, k**0.5 * torch.finfo(torch.float32).eps))


def test_gradients_in_float64() -> None:
    given = Given(5, 4, 11, 3, dtype=torch.float64)
    fixed = {"tau_t": 0.3, "tau_s": 0.5, "chunk": 22}

    def loss(s: Tensor, w_s: Tensor) -> Tensor:
        return cross_entropy(given.t, s, given.w_t, w_s, given.center, given.matched, **fixed)

    assert torch.autograd.gradcheck(loss, (given.s.requires_grad_(), given.w_s.requires_grad_()))


@on_both
def test_autocast_forms_products_in_bfloat16_and_sums_in_float32(device: str) -> None:
    given = Given(40, 20, 4096, 64, device=device)
    with torch.autocast(device, torch.bfloat16):
        half = given.ours()
    assert {x.dtype for x in half} == {torch.float32}
    assert_near(half, given.plain(), 2e-2)
    assert not torch.equal(half[1], given.ours()[1])


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, tuple | list) else [out]:
            self.size = max(self.size, x.numel() if isinstance(x, Tensor) else 0)
        return out


def test_scores_are_there_in_chunks() -> None:
    given = Given(200, 100, 500, 3)
    with Largest() as largest:
        given.ours(chunk=4000)
    assert largest.size == 4000
    with Largest() as largest:
        given.plain()
    assert largest.size == 200 * 500


def test_a_student_that_agrees_has_no_gradient_and_the_entropy_for_a_loss() -> None:
    given = Given(6, 6, 300, 8, dtype=torch.float64)
    s, w = given.t.clone().requires_grad_(), given.w_t.clone().requires_grad_()
    matched = Match(torch.arange(6).unsqueeze(1), torch.full((6,), 1 / 6, dtype=torch.float64))
    none = torch.zeros(300, dtype=torch.float64)
    loss = cross_entropy(given.t, s, given.w_t, w, none, matched, tau_t=0.2, tau_s=0.2)
    loss.backward()
    p = probabilities(given.t, given.w_t, none, 0.2)
    torch.testing.assert_close(loss, entropy.entropy(p) * torch.tensor(300.0, dtype=torch.float64).log())
    assert s.grad.abs().max() < 1e-12
    assert w.grad.abs().max() < 1e-12


def test_a_row_without_a_teacher_counts_for_nothing() -> None:
    given = Given(9, 4, 50, 5)
    given.matched.teacher[3] = -1
    loss, grad, grad_w = given.ours()
    assert torch.equal(grad[3], torch.zeros(5))
    keep = torch.arange(9) != 3
    given.s, given.matched = given.s[keep], Match(*(x[keep] for x in given.matched))
    assert_near([loss, grad[keep], grad_w], given.ours(), 1e-6)


def test_what_is_frozen_has_no_gradient() -> None:
    given = Given(4, 3, 10, 2)
    s, t, w_t = given.s.requires_grad_(), given.t.requires_grad_(), given.w_t.requires_grad_()
    args = (given.center, given.matched)
    loss = cross_entropy(t, s, w_t, given.w_s, *args, tau_t=0.1, tau_s=0.1)
    loss.backward()
    assert s.grad is not None
    assert t.grad is None
    assert w_t.grad is None
    assert given.w_s.grad is None
    with torch.no_grad():
        again = cross_entropy(t, s, w_t, given.w_s, *args, tau_t=0.1, tau_s=0.1)
    assert torch.equal(again, loss)


def test_gradients_pass_through_the_head() -> None:
    torch.manual_seed(0)
    head, x = PrototypeHead(6, 40, hidden=8, bottleneck=4, free_scale=True), torch.randn(9, 6)
    given, none = Given(9, 5, 40, 4), torch.zeros(40)
    z, w = F.normalize(head.mlp(x), dim=1), head.last.weight
    ours = cross_entropy(given.t, z, given.w_t, w, none, given.matched, tau_t=0.05, tau_s=0.1)
    theirs = plain(given.t, z, given.w_t, w, none, given.matched)
    params = list(head.parameters())
    grads = [torch.autograd.grad(loss, params, retain_graph=True) for loss in (ours, theirs)]
    assert_near(*map(list, grads), 1e-4)


def test_tokens_are_matched_within_the_image_and_outside_the_view() -> None:
    g = torch.Generator().manual_seed(1)
    lengths = torch.randn(3, 4, 1, generator=g).exp() ** 3
    t = [lengths * torch.randn(3, 4, 5, generator=g) for _ in range(2)]
    moved = torch.stack([torch.randperm(4, generator=g) for _ in range(3)])  # (B, M)
    shuffled = [x.gather(1, moved.unsqueeze(-1).expand_as(x)) for x in t]
    small = torch.stack([t[1][:, 2], t[1][:, 0]], 1)
    teacher, weight = match([shuffled[1], shuffled[0], small], t)

    image = torch.arange(3).unsqueeze(1)
    own = 4 * image + moved
    rows = teacher.split([12, 12, 6])
    assert torch.equal(rows[0], torch.stack([torch.full((12,), -1), 12 + own.flatten()], 1))
    assert torch.equal(rows[1], torch.stack([own.flatten(), torch.full((12,), -1)], 1))
    assert torch.equal(rows[2][:, 1], (12 + 4 * image + torch.tensor([2, 0])).flatten())
    assert torch.equal(rows[2][:, 0] // 4, image.expand(3, 2).flatten())
    # Four pairs of views, each a mean over images and tokens.
    torch.testing.assert_close(weight * (teacher >= 0).sum(1), torch.tensor([1 / 48] * 24 + [2 / 24] * 6))


def test_tokens_are_matched_in_full_precision() -> None:
    t = F.normalize(torch.ones(8) + 1e-3 * torch.randn(2, 1, 40, 8), dim=-1)  # alike in half of it
    alone = match(t.unbind(0), t.unbind(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(match(t.unbind(0), t.unbind(0)).teacher, alone.teacher)
    assert len(alone.teacher.unique()) > 20


def test_probabilities_and_mean_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(8, 8, 30, 4)
    scores = given.t @ given.w_t.T
    p = probabilities(given.t.requires_grad_(), given.w_t, given.center, 0.05)
    torch.testing.assert_close(p, F.softmax((scores - given.center) / 0.05, dim=1))
    assert not p.requires_grad
    torch.testing.assert_close(mean_scores(given.t, given.w_t, 8), scores.mean(0))
    other = torch.randn(6, 4)
    monkeypatch.setattr(dist, "total", lambda x: x + other.sum(0))
    both = torch.cat([given.t, other]) @ given.w_t.T
    torch.testing.assert_close(mean_scores(given.t, given.w_t, 14), both.mean(0))


def test_scores_far_apart() -> None:
    """Prototypes with trained lengths can grow; large scores must neither overflow nor hide small ones."""
    given = Given(6, 4, 30, 4)
    given.w_s *= 1000
    given.w_t *= 1000
    assert all(x.isfinite().all() for x in given.ours())
    assert_near(given.ours(), given.plain(), 1e-5)


def views(x: Tensor, *counts: tuple[int, int, int]) -> Iterator[Tensor]:
    """Yield the rows as views (B, N, D), for each (views, images, tokens)."""
    for number, images, tokens in counts:
        size = number * images * tokens
        yield from x[:size].view(number, images, tokens, x.shape[1])
        x = x[size:]


def loss_of(t: Tensor, s: Tensor, center: Tensor, matched: Match, tau_t: float, tau_s: float) -> Tensor:
    """Return the loss of scores: with unit prototypes along the axes, they equal the bottleneck vectors."""
    t_axes, s_axes = torch.eye(t.shape[1]), torch.eye(s.shape[1])
    return cross_entropy(t, s, t_axes, s_axes, center, matched, tau_t=tau_t, tau_s=tau_s, chunk=3 * len(t_axes))


def temperature(h: dict[str, Any], epoch: int) -> float:
    warm, n = h["warmup_teacher_temp"], h["warmup_teacher_temp_epochs"]
    return warm + (h["teacher_temp"] - warm) * epoch / max(n - 1, 1) if epoch < n else h["teacher_temp"]


@cases("dino_loss")
def test_dino(case: Case) -> None:
    h, center = case.hyper, case["center_initial"].squeeze(0)
    for call, epoch in enumerate(case["epochs"].tolist()):
        t, s = case[f"call{call}_teacher"], case[f"call{call}_student"].requires_grad_()
        b = h["batch"]
        matched = match(list(views(s, (h["ncrops"], b, 1))), list(views(t, (h["n_global"], b, 1))))
        loss = loss_of(t, s, center, matched, temperature(h, epoch), h["student_temp"])
        loss.backward()
        case.check(loss, f"call{call}_loss")
        case.check(s.grad, f"call{call}_grad_student")
        center = center.lerp(mean_scores(t, torch.eye(t.shape[1]), len(t)), 1 - h["center_momentum"])
        case.check(center.unsqueeze(0), f"call{call}_center_after")


@cases("esvit_ddino_loss")
def test_esvit(case: Case) -> None:
    h, k, n = case.hyper, case.hyper["out_dim"], case.hyper["n_global"]
    b, m = h["batch"], h["tokens_global"]
    large, small = (n, b, m), (h["n_local"], b, h["tokens_local"])
    centers = {"cls": torch.zeros(k), "region": torch.zeros(k)}
    for call, epoch in enumerate(case["epochs"].tolist()):
        now = f"call{call}_"
        s = {name: case[f"{now}s_{name}"].requires_grad_() for name in centers}
        t = {name: case[f"{now}t_{name}"] for name in centers}
        matched = {
            "cls": match(list(views(s["cls"], (n + h["n_local"], b, 1))), list(views(t["cls"], (n, b, 1)))),
            "region": match(list(views(case[f"{now}s_feat"], large, small)), list(views(case[f"{now}t_feat"], large))),
        }
        per_view = matched["region"].teacher.split([b * m] * n + [b * h["tokens_local"]] * h["n_local"])
        for v, rows in enumerate(per_view):
            for q in {*range(n)} - {v}:
                found = rows[:, q].view(b, -1) - m * (q * b + torch.arange(b).unsqueeze(1))
                case.check(found, f"{now}match_q{q}_v{v}")

        loss = torch.zeros(())
        for name, meaning in {"cls": "view", "region": "region"}.items():
            tau_t = temperature(h, epoch)
            part = loss_of(t[name], s[name], centers[name], matched[name], tau_t, h["student_temp"])
            case.check(part, f"{now}{meaning}_loss")
            loss = loss + h[f"weight_{meaning}"] * part
            mean = mean_scores(t[name], torch.eye(k), len(t[name]))
            centers[name] = centers[name].lerp(mean, 1 - h["center_momentum"])
        loss.backward()
        case.check(loss, f"{now}loss")
        for name, after in {"cls": "center_after", "region": "center_grid_after"}.items():
            case.check(s[name].grad, f"{now}grad_s_{name}")
            case.check(centers[name].unsqueeze(0), f"{now}{after}")


@cases("selfpatch_loss")
def test_selfpatch(case: Case) -> None:
    """SelfPatch's patch loss compares patches at the same position of the same crop."""
    h, sizes = case.hyper, ("global", "local")
    s = {size: case[f"student_patch_{size}"].requires_grad_() for size in sizes}  # (crops * B, N, K)
    t, n = [case[f"teacher_patch_{size}"].flatten(0, 1) for size in sizes], h["global_crops"] + h["local_crops"]
    weight = torch.cat([torch.full((x.shape[0] * x.shape[1],), 1 / (n * h["batch"] * x.shape[1])) for x in s.values()])
    rows = torch.cat([x.flatten(0, 1) for x in s.values()])
    matched, center = Match(torch.arange(len(rows)).unsqueeze(1), weight), case["patch_center_before"].squeeze(0)
    loss = loss_of(torch.cat(t), rows, center, matched, h["teacher_temp_used"], h["student_temp"])
    case.check(loss, "patch_loss")
    (h["patch_weight"] * loss).backward()
    for size, x in s.items():
        case.check(x.grad, f"grad_student_patch_{size}")


@cases("swav_loss")
def test_swav(case: Case) -> None:
    """SwAV's assignment equals a teacher's softmax with a centre that Sinkhorn's iterations compute."""
    h = case.hyper
    names = [f"{size}{i}" for size in ("high", "low") for i in range(h[size])]
    s = [case[name].requires_grad_() for name in names]
    high, b, eps = s[: h["high"]], h["batch"], h["epsilon"]
    q = [case[f"q{i}"] for i in range(h["high"])]
    v, w = [x.detach().unsqueeze(1) for x in s], [x.detach().unsqueeze(1) for x in high]
    teacher, weight = match(v, w)
    loss = torch.zeros(())
    for i, (scores, assigned) in enumerate(zip(high, q, strict=True)):
        center = (scores.detach() - eps * assigned.log()).mean(0)
        torch.testing.assert_close(probabilities(scores, torch.eye(h["prototypes"]), center, eps), assigned)
        own = torch.where((teacher[:, i] >= 0), teacher[:, i] - i * b, -1).unsqueeze(1)
        loss = loss + loss_of(scores, torch.cat(s), center, Match(own, weight), eps, h["temperature"])
    loss.backward()
    case.check(loss, "loss")
    for name, x in zip(names, s, strict=True):
        case.check(x.grad, f"grad_{name}")
