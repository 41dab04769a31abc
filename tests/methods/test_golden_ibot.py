"""iBOT against the authors' code, github.com/bytedance/ibot, whose class iBOTLoss was run on random scores."""

from collections.abc import Sequence

import pytest
import torch
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.masked import masks_of
from eagleray.losses.prototypes import Scores
from eagleray.methods import ibot

EPOCH = 7  # steps in one


class Fixed(nn.Module):
    """An encoder of fixed scores: with unit prototypes along the axes, they equal the bottleneck vectors."""

    def __init__(self, images: Tensor, patches: Tensor) -> None:
        super().__init__()
        self.images, self.patches = nn.Parameter(images), nn.Parameter(patches)
        self.backbone = vit(8, 2, 4, depth=1, heads=1)

    def embed(self, views: Sequence[Tensor], hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.images, self.patches.flatten(0, 1)

    def image_scores(self, x: Tensor) -> Scores:
        return Scores(x, torch.eye(x.shape[1]))

    patch_scores = image_scores


@cases("ibot_loss")
def test_loss(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    h = case.hyper
    rise = {"value": h["teacher_temp"], "warmup_from": h["warmup_teacher_temp"]}
    temperature = Schedule(**rise, warmup=h["warmup_teacher_temp_epochs"], inclusive=True, per_epoch=True)
    own = None if h["patch_prototypes"] == h["prototypes"] else h["patch_prototypes"]
    method = ibot.IBOT(
        vit(8, 2, 4, depth=1, heads=1),
        prototypes=h["prototypes"],
        patch_prototypes=own,
        student_temp=h["student_temp"],
        teacher_temp=temperature,
        center_momentum=h["center_momentum"],
    )
    none = torch.empty(0)
    batch = Batch([torch.empty(h["batch"], 3, 8, 8)] * h["views"], index=none, label=none, rows=(h["batch"],))
    for call, epoch in enumerate(h["epochs"]):
        now = f"call{call}_"
        case.check(method.center, f"{now}center_before")
        case.check(method.patch_center, f"{now}patch_center_before")
        masks = masks_of(case[f"{now}mask"].flatten(0, 1).numpy(), torch.device("cpu"))
        monkeypatch.setattr(ibot, "draw_masks", lambda *_, masks=masks: masks)
        method.student = student = Fixed(case[f"{now}student_cls"], case[f"{now}student_patch"])
        method.teacher = teacher = Fixed(case[f"{now}teacher_cls"], case[f"{now}teacher_patch"])
        out = method(batch, Progress(epoch * EPOCH + 3, EPOCH, h["nepochs"]))
        out["loss"].backward()
        for ours, theirs in (("view", "cls"), ("patch", "patch"), ("loss", "loss")):
            case.check(out[ours], now + theirs)
        case.check(student.images.grad, f"{now}grad_student_cls")
        case.check(student.patches.grad, f"{now}grad_student_patch")
        assert teacher.images.grad is None
        assert teacher.patches.grad is None
        case.check(method.center, f"{now}center_after")
        case.check(method.patch_center, f"{now}patch_center_after")
