"""DRLoc's losses against the authors' code, github.com/yhlleo/VTs-Drloc."""

from typing import Any

import torch
from helpers.golden_cases import Case, cases
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.losses.relative_location import Localiser, drloc_loss, pool_grid

KINDS = {"l1": "l1", "ce": "ce", "cbr": "reg"}


def localiser(case: Case, prefix: str = "w.") -> Localiser:
    weights = {name.replace("unshared", "axes"): value for name, value in case.under(prefix).items()}
    classes = weights.get("axes.0.weight")
    out = Localiser(weights["layers.0.weight"].shape[1] // 2, None if classes is None else len(classes))
    out.load_state_dict(weights)
    return out


def pairs(case: Case, width: int, suffix: str = "") -> tuple[Tensor, Tensor]:
    first, second = (case[f"{name}{suffix}"] for name in ("pos1", "pos2"))
    return first[..., 0] * width + first[..., 1], second[..., 0] * width + second[..., 1]


def mode(case: Case) -> Any:
    return KINDS[case.hyper["mode"]] + ("" if case.hyper["use_abs"] else "_signed")


def check(case: Case, targets: Any, loss: str, grad: str) -> None:
    x = case["x"].requires_grad_()
    out = drloc_loss(localiser(case), x, pairs(case, x.shape[3]), mode=mode(case), targets=targets)
    out.backward()
    case.check(out, loss)
    case.check(x.grad, grad)


@cases("drloc_l1")
def test_numbers(case: Case) -> None:
    check(case, "raw", "loss", "grad_x")
    check(case, "normalised", "loss_norm", "grad_x_norm")
    check(case, "paper", "loss_paper_mean", "grad_x_paper")


@cases("drloc_ce")
def test_classes(case: Case) -> None:
    check(case, "raw", "loss", "grad_x")


@cases("drloc_reg")
def test_moments(case: Case) -> None:
    check(case, "raw", "loss", "grad_x")


@cases("drloc_l1")
def test_the_localiser_sees_the_first_token_before_the_second(case: Case) -> None:
    x = case["x"]
    seen: list[Tensor] = []
    f = localiser(case)
    f.register_forward_hook(lambda _, __, out: seen.append(out))
    drloc_loss(f, x, pairs(case, x.shape[3]), mode=mode(case))
    case.check(seen[0], "pred")


@cases("drloc_exhaustive")
def test_exhaustive(case: Case) -> None:
    x = case["x"].requires_grad_()
    partner = case["partner"]
    drawn = torch.arange(partner.shape[1]).expand_as(partner), partner
    case.check(drloc_loss(localiser(case), x, drawn, mode="l1"), "loss_unnormalised")
    loss = drloc_loss(localiser(case), x, drawn, mode="l1", targets="paper")
    loss.backward()
    case.check(loss, "loss_div_k")
    case.check(x.grad, "grad_x_div_k")


@cases("drloc_multigrid")
def test_a_localiser_for_each_grid(case: Case) -> None:
    grids = [case[f"x{i}"].requires_grad_() for i in range(case.count("x{}"))]
    found = [
        drloc_loss(localiser(case, f"w{i}."), x, pairs(case, x.shape[3], f"_{i}"), mode="l1")
        for i, x in enumerate(grids)
    ]
    loss = case.hyper["lam"] * torch.stack(found).sum()
    loss.backward()
    case.check(loss, "loss")
    for i, x in enumerate(grids):
        case.check(x.grad, f"grad_x{i}")


@cases("drloc_pool")
def test_pooling(case: Case) -> None:
    x, k = case["x"], case["paper"].shape[3]
    case.check(pool_grid(x, k, "3x3"), "official")
    case.check(pool_grid(x, k, "2x2"), "paper")


@cases("drloc_lambda_schedule")
def test_lambda(case: Case) -> None:
    h = case.hyper
    weight = Schedule(value=h["init"], warmup=h["warmup_epochs"], end=0.0, straight=True, per_epoch=True)
    for epoch, expected in zip(case["epoch"].tolist(), case["lam"], strict=True):
        for step in (0, 3):  # it moves between epochs only
            case.equal(weight(Progress(epoch * 4 + step, 4, h["total_epoch"])), expected, f"epoch {epoch}")
