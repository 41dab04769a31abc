"""EsViT's losses against the authors' code, github.com/microsoft/esvit."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.prototypes import Match, Scores, cross_entropy, mean_scores
from eagleray.losses.regions import Regions
from eagleray.methods.esvit import EsViT

EPOCH = 5  # steps in one


class Fixed(nn.Module):
    """An encoder that returns fixed scores and features; its prototypes are the axes."""

    def __init__(self, scores: dict[str, Tensor], features: list[Tensor]) -> None:
        super().__init__()
        self.scores, self.features = nn.ParameterDict(scores), features

    def project(self, views: Sequence[Tensor], generator: torch.Generator | None) -> tuple[Scores, Regions]:
        assert generator
        whole, region = (Scores(self.scores[n], torch.eye(self.scores[n].shape[1])) for n in ("cls", "region"))
        return whole, Regions(self.features, region)


def temperature(h: dict[str, Any]) -> Schedule:
    warmup = {"warmup_from": h["warmup_teacher_temp"], "warmup": h["warmup_teacher_temp_epochs"]}
    return Schedule(value=h["teacher_temp"], **warmup, inclusive=True, per_epoch=True)


def views(x: Tensor, *counts: tuple[int, int, int]) -> Iterator[Tensor]:
    """Yield the rows as views (B, N, D), for each (views, images, tokens)."""
    for number, images, tokens in counts:
        yield from x[: number * images * tokens].view(number, images, tokens, x.shape[1])
        x = x[number * images * tokens :]


@cases("esvit_ddino_loss")
def test_ddino_loss(case: Case) -> None:
    h, b = case.hyper, case.hyper["batch"]
    method = EsViT(
        vit(8, 8, 4, depth=1, heads=1),
        prototypes=h["out_dim"],
        hidden=4,
        bottleneck=4,
        student_temp=h["student_temp"],
        teacher_temp=temperature(h),
        center_momentum=h["center_momentum"],
        view_weight=h["weight_view"],
        region_weight=h["weight_region"],
    )
    for call, epoch in enumerate(case["epochs"].tolist()):
        found = {}
        for who, local in {"s": h["n_local"], "t": 0}.items():
            given = {name: case[f"call{call}_{who}_{name}"] for name in ("cls", "region", "feat")}
            tokens = list(views(given["feat"], (h["n_global"], b, h["tokens_global"]), (local, b, h["tokens_local"])))
            scores = {name: given[name] for name in ("cls", "region")}
            found[who] = Fixed(scores, tokens)
        method.student, method.teacher = found["s"], found["t"]

        none = torch.empty(0)
        crops = [torch.empty(b, 3, 8, 8)] * (h["n_global"] + h["n_local"])
        batch = Batch(crops, index=none, label=none, rows=(b,))
        out = method(batch, Progress(epoch * EPOCH + EPOCH - 1, EPOCH, h["nepochs"]))
        out["loss"].backward()
        for name in ("loss", "view", "region"):
            case.check(out[name], f"call{call}_{name}" + ("" if name == "loss" else "_loss"))
        for name in ("cls", "region"):
            case.check(found["s"].scores[name].grad, f"call{call}_grad_s_{name}")
            assert found["t"].scores[name].grad is None
        case.check(method.center.unsqueeze(0), f"call{call}_center_after")
        case.check(method.region_center.unsqueeze(0), f"call{call}_center_grid_after")


@cases("esvit_dino_loss_mixup")
def test_mixed_images_are_weights_of_pairs(case: Case) -> None:
    """No option: no recipe mixes images, and where regions are learnt from the authors' code does not either. But the
    loss that we have says it, with a student row for each image that the teacher's rows are weighed by."""
    h, b, v = case.hyper, case.hyper["batch"], case.hyper["ncrops"]
    s, t = case["student"].requires_grad_(), case["teacher"]
    q = len(t) // b
    axes, center = torch.eye(h["out_dim"]), torch.zeros(h["out_dim"])
    image = torch.arange(b)
    # (V, B of the teacher, B of the student)
    student = (b * torch.arange(v).view(v, 1, 1) + image).expand(v, b, b)
    teacher = torch.stack([b * i + image.view(1, b, 1).expand(v, b, b) for i in range(q)], -1)
    teacher = teacher.masked_fill(torch.eye(v, q, dtype=torch.bool).view(v, 1, 1, q), -1)
    weight = case["mix_targets"] / (b * (v * q - q))
    tau_t = temperature(h)(Progress(h["epoch"] * EPOCH, EPOCH, h["nepochs"]))
    matched = Match(teacher.flatten(0, 2), weight.flatten())
    loss = cross_entropy(t, s[student.flatten()], axes, axes, center, matched, tau_t=tau_t, tau_s=h["student_temp"])
    loss.backward()
    case.check(loss, "loss")
    case.check(s.grad, "grad_student")
    case.check(center.lerp(mean_scores(t, axes, len(t)), 1 - h["center_momentum"]).unsqueeze(0), "center_after")
