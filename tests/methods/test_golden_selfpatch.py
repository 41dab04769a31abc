"""SelfPatch against the authors' code, github.com/alinlab/SelfPatch."""

import re
from math import isqrt
from typing import Any

import torch
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.methods.selfpatch import SelfPatch
from eagleray.models.class_attention import Aggregation, AggregationBackbone
from eagleray.models.heads import PrototypeHead
from eagleray.models.patch_neighbors import most_similar_neighbours, neighbours


@cases("selfpatch_neighbour_index")
def test_neighbours(case: Case) -> None:
    for name, expected in case.arrays.items():
        side = isqrt(int(re.findall(r"\d+", name)[-1]))
        assert torch.equal(neighbours((side, side), wrap=True), expected)


@cases("selfpatch_aggregation")
def test_positive_matching(case: Case) -> None:
    h, x = case.hyper, case["x"]
    side = isqrt(h["num_patches"])
    place, there = most_similar_neighbours(x, (side, side), h["k"], wrap=True)
    expected = case["neighbours"].expand(len(x), -1, -1).gather(2, case["topk_slot"])
    assert there.all()
    # Where two neighbours are as alike as float32 can tell, either may come first.
    gap = case["similarity"].sort(-1, descending=True).values.diff(dim=-1).abs().amin(-1) > 1e-6
    assert gap.float().mean() > 0.9
    assert torch.equal(place[gap], expected[gap])


@cases("selfpatch_aggregation")
def test_aggregation(case: Case) -> None:
    h = case.hyper
    side = isqrt(h["num_patches"])
    module = Aggregation(h["dim"], h["num_heads"])
    module.load_state_dict({ours(name): value for name, value in case.under("w.").items()})
    for who in ("teacher", "student"):
        x = case["x"].requires_grad_()
        taught = who == "teacher"
        tokens = module.aggregate_neighbours(x, (side, side), h["k"], wrap=True) if taught else module.norm(x)
        out = torch.cat([module(x).unsqueeze(1), tokens], 1)
        (out * case[f"cot_{who}"]).sum().backward()
        case.check(out, f"out_{who}")
        case.check(x.grad, f"grad_x_{who}")


def ours(name: str) -> str:
    """Return our name for a weight of the authors, who wrap attention in a module of its own."""
    return name.replace("cls_token", "token").replace("cls_blocks", "blocks").replace(".attn.", ".")


@cases("selfpatch_dinohead")
def test_head(case: Case) -> None:
    h, x = case.hyper, case["x"].requires_grad_()
    head = PrototypeHead(h["in_dim"], h["out_dim"], layers=h["layers"], hidden=h["hidden"], bottleneck=h["bottleneck"])
    last = "last.parametrizations.weight.original"
    names = {"last_layer.weight_g": last + "0", "last_layer.weight_v": last + "1"}
    head.load_state_dict({names.get(name, name): value for name, value in case.under("w.").items()})
    out = head.last(head(x))
    (out * case["cotangent"]).sum().backward()
    case.check(out, "out")
    case.check(x.grad, "grad_x")
    assert not dict(head.named_parameters())[last + "0"].requires_grad


@cases("selfpatch_cosine_schedule")
def test_schedule(case: Case) -> None:
    h = case.hyper
    schedule = Schedule(value=h["base_value"], warmup=h["warmup_epochs"], end=h["final_value"], inclusive=True)
    at = [Progress(step, h["niter_per_ep"], h["epochs"]) for step in range(len(case["value"]))]
    case.check(torch.tensor([schedule(a) for a in at], dtype=torch.float64), "value")


class Given(nn.Module):
    """An encoder that returns fixed scores; its prototypes are the axes."""

    def __init__(self, case: Case, who: str) -> None:
        super().__init__()
        self.scores = nn.ParameterDict(case.under(f"{who}_"))
        self.head, self.patch_head = (Axes(self.scores[f"{what}_global"].shape[-1]) for what in ("cls", "patch"))

    def features(self, views: list[Tensor]) -> list[str]:
        return ["global", "local"]

    def images(self, features: list[str]) -> Tensor:
        return torch.cat([self.scores[f"cls_{size}"].squeeze(1) for size in features])

    def patches(self, features: list[str]) -> list[Tensor]:
        return [self.scores[f"patch_{size}"] for size in features]

    def targets(self, features: list[str], k: int, *, wrap: bool) -> list[Tensor]:
        return self.patches(features)


class Axes(nn.Module):
    def __init__(self, prototypes: int) -> None:
        super().__init__()
        self.last = nn.Linear(prototypes, prototypes, bias=False).requires_grad_(False)
        self.last.weight.copy_(torch.eye(prototypes))


@cases("selfpatch_loss")
def test_loss(case: Case) -> None:
    h, b, epochs = case.hyper, case.hyper["batch"], case.hyper["nepochs"]
    teacher_temp = Schedule(
        value=h["teacher_temp"],
        warmup_from=h["warmup_teacher_temp"],
        warmup=h["warmup_teacher_temp_epochs"],
        inclusive=True,
        per_epoch=True,
    )
    method = small(
        prototypes=case["center_before"].numel(),
        patch_prototypes=case["patch_center_before"].numel(),
        patch_weight=h["patch_weight"],
        student_temp=h["student_temp"],
        teacher_temp=teacher_temp,
        center_momentum=h["center_momentum"],
    )
    method.center.copy_(case["center_before"].flatten())
    method.patch_center.copy_(case["patch_center_before"].flatten())
    student, teacher = Given(case, "student"), Given(case, "teacher")
    method.student, method.teacher = student, teacher
    at = Progress(step=h["epoch"] * 5 + 3, steps_per_epoch=5, epochs=epochs)
    assert abs(teacher_temp(at) - h["teacher_temp_used"]) < 1e-9
    views = [torch.empty(b, 3, 8, 8)] * (h["global_crops"] + h["local_crops"])
    out = method(Batch(views, torch.empty(0), torch.empty(0), (b,)), at)
    out["loss"].backward()
    case.check(out["loss"], "loss")
    case.check(out["patch"], "patch_loss")
    case.check(out["loss"] - h["patch_weight"] * out["patch"], "cls_loss")
    for name, scores in student.scores.items():
        case.check(scores.grad, f"grad_student_{name}")
    assert all(p.grad is None for p in teacher.parameters())
    case.check(method.center.view_as(case["center_after"]), "center_after")
    case.check(method.patch_center.view_as(case["patch_center_after"]), "patch_center_after")


def small(**keys: Any) -> SelfPatch:
    torch.manual_seed(0)
    sizes = {"prototypes": 40, "patch_prototypes": 24, "hidden": 16, "bottleneck": 8, "heads": 3, "freeze_last": 0}
    return SelfPatch(vit(24, 8, 24, depth=2, heads=3, pool="mean"), **(sizes | keys))


def test_the_backbone_is_the_authors() -> None:
    """The backbone has neither class token nor final norm, and its position table has one row per patch."""
    model = AggregationBackbone(vit(24, 8, 24, depth=2, heads=3, pool="mean"), 3).model
    assert model.num_prefix_tokens == 0
    assert isinstance(model.norm, nn.Identity)
    assert model.pos_embed.shape == (1, 9, 24)
