"""DINOv3 against the authors' code, github.com/facebookresearch/dinov3.

Its loss classes and its transformer were run on random numbers, on one process and without the compiler; the boxes of
positions that it drew were recorded.
"""

from collections.abc import Sequence

import pytest
import torch
from helpers.golden_cases import Case, cases, vit
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.config.view import View
from eagleray.losses.gram import gram_loss, resized
from eagleray.losses.koleo import koleo_loss
from eagleray.losses.masked import masks_of
from eagleray.losses.prototypes import H, Scores, match_views, probabilities
from eagleray.losses.sinkhorn import sinkhorn_center
from eagleray.methods.dinov3 import ITERATIONS, DINOv3
from eagleray.models import weights
from eagleray.models.backbone import Backbone
from eagleray.models.rotary import rotary_features, turned
from eagleray.models.tokens import Hidden


@cases("dinov3_view_loss")
def test_loss_of_images(case: Case) -> None:
    h, s, t = case.hyper, case["student"].requires_grad_(), case["teacher"]
    images, axes = t.shape[1], torch.eye(t.shape[2])
    student, teacher = Scores(s.flatten(0, 1), axes), Scores(t.flatten(0, 1), axes)
    center = sinkhorn_center(teacher, h["teacher_temp"], ITERATIONS)
    case.check(probabilities(teacher.z, axes, center, h["teacher_temp"]).view_as(t), "targets")
    pairs = match_views(teacher, student, images)
    pairs.weight[2 * images :] *= h["small_weight"]
    loss = H(teacher, student, pairs, center, h["teacher_temp"], h["student_temp"])
    loss.backward()
    case.check(loss, "loss")
    case.check(s.grad, "grad_student")


@cases("dinov3_patch_loss")
def test_loss_of_patches(case: Case) -> None:
    h, s = case.hyper, case["student"].requires_grad_()
    masks, axes = masks_of(case["mask"].numpy(), torch.device("cpu")), torch.eye(s.shape[2])
    t_hidden = Scores(case["teacher"].flatten(0, 1)[masks.rows], axes)
    s_hidden = Scores(s.flatten(0, 1)[masks.rows], axes)
    center = sinkhorn_center(t_hidden, h["teacher_temp"], ITERATIONS)
    case.check(probabilities(t_hidden.z, axes, center, h["teacher_temp"]), "targets")
    loss = H(t_hidden, s_hidden, masks.pairs, center, h["teacher_temp"], h["student_temp"])
    loss.backward()
    case.check(loss, "loss")
    case.check(s.grad, "grad_student")


@cases("dinov3_koleo")
def test_koleo_of_groups(case: Case) -> None:
    x = case["x"].requires_grad_()
    loss = koleo_loss(x, (len(x),), case.hyper["group"])
    loss.backward()
    case.check(loss, "loss")
    case.check(x.grad, "grad")


@cases("dinov3_gram")
def test_gram_loss(case: Case) -> None:
    h, x = case.hyper, case["student"].requires_grad_()
    anchor = resized(case["teacher"], (h["teacher_side"],) * 2, (h["side"],) * 2)
    loss = gram_loss(x, anchor, cut=h["cut"])
    loss.backward()
    case.check(loss, "loss")
    case.check(x.grad, "grad_student")


@cases("dinov3_rope")
def test_rotary_positions(case: Case) -> None:
    h, w = case.hyper["grid"]
    sin, cos = turned(case["periods"], (h, w), case["shift"][None], case["scale"][None])[0].chunk(2, 1)
    case.check(sin, "sin")
    case.check(cos, "cos")


@cases("dinov3_vit")
def test_features_and_gradients_of_the_transformer(case: Case) -> None:
    h = case.hyper
    options = {"img_size": 16, "patch_size": h["patch"], "embed_dim": h["dim"], "depth": h["depth"]}
    options |= {"num_heads": h["heads"], "num_reg_tokens": h["registers"], "global_pool": "token"}
    ours = Backbone("vit_small_patch16_dinov3_qkvb", options=options)
    report = weights.fill(ours, weights.from_tensors("theirs.pth", case.under("param/")), whole=True)
    assert report.share == 1
    assert not report.missing
    token = case["param/mask_token"].requires_grad_()
    x, small, hidden = case["x"], case["small"], Hidden(case["mask"], token)
    if h["training"]:  # a box for each block and size
        turns = [
            turned(ours.model.rope.periods, ours.patch_grid(images), box[:, :2], box[:, 2:])
            for images, box in zip((x, small), case["boxes"], strict=True)
        ]
        out = rotary_features(ours.model, x, turns[0], hidden)
        cls, patches, small_cls = (
            out[:, 0],
            out[:, 1 + h["registers"] :],
            rotary_features(ours.model, small, turns[1])[:, 0],
        )
    else:
        large, other = ours.eval().sizes([x, small], hidden)
        cls, patches, small_cls = large.pooled, large.patches, other.pooled
    case.check(cls, "cls")
    case.check(patches, "patches")
    case.check(small_cls, "small_cls")
    each = zip((cls, patches, small_cls), ("cls", "patches", "small_cls"), strict=True)
    torch.stack([(out * case[f"w_{name}"]).sum() for out, name in each]).sum().backward()
    case.near(token.grad, "grad_mask_token")
    case.near(ours.model.patch_embed.proj.weight.grad, "grad_patch")
    case.near(ours.model.reg_token.grad, "grad_registers")
    case.near(ours.model.blocks[0].attn.qkv.weight.grad, "grad_qkv")
    case.near(ours.model.blocks[1].attn.proj.weight.grad, "grad_proj")


def method(**keys: float | None) -> DINOv3:
    small = {"prototypes": 8, "patch_prototypes": 8, "hidden": 8, "patch_hidden": 8, "bottleneck": 4}
    torch.manual_seed(0)
    return DINOv3(vit(16, 4, 8, depth=1, heads=1), **(small | {"patch_bottleneck": 4} | keys))  # type: ignore[arg-type]


def views(*sizes: int) -> list[Tensor]:
    return [torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(i)) for i, size in enumerate(sizes)]


def test_the_gram_teacher_is_the_teacher_of_its_epoch_and_of_each_refresh() -> None:
    """Epochs of ten steps: the teacher of step 5 is the first one; anchored from step 20, new ones after 25 and 30."""
    m = method(gram_start=2.0, gram_teacher=0.5, gram_every=0.5, gram_refreshes=2)
    teacher, gram = m.teacher.backbone.model.norm.weight, m.gram
    assert gram
    taken: list[float] = []
    for step in range(40):
        at = Progress(step, 10, 4)
        assert m.anchored(at) == (step >= 20)
        with torch.no_grad():
            m.student.backbone.model.norm.weight.fill_(step + 1.0)
        m.after_step(at)
        taken.append(float(gram.model.norm.weight[0]))
        if step + 1 in (5, 25, 30):
            assert taken[-1] == float(teacher[0])
        elif step:
            assert taken[-1] == taken[-2]
    assert len(set(taken)) == 4


def test_the_loss_is_anchored_to_the_sharper_views() -> None:
    seen, whole = views(16, 32, 16, 32, 8), {"mask_probability": 0.0, "small_weight": 1.0}
    plain, anchored = method(**whole), method(gram_start=0.1, gram_weight=3.0, **whole)
    crops = [seen[0], seen[2], seen[4]]
    assert anchored.gram
    with torch.no_grad():  # other similarities than the student's
        anchored.gram.model.blocks[0].mlp.fc2.weight.normal_()
    early, late = Progress(0, 10, 4), Progress(1, 10, 4)
    assert torch.equal(anchored.loss(seen, at=early), plain.loss(crops, at=early)), "nothing counts before the start"
    grids = [anchored.gram(seen[i]) for i in (1, 3)]
    anchor = torch.cat([resized(x.patches, x.grid, (4, 4)) for x in grids])
    want = gram_loss(anchored.student.embed(crops)[1].unflatten(0, (8, 16)), anchor)
    assert want > 0.01
    torch.testing.assert_close(
        anchored.loss(seen, at=late) - plain.loss(crops, at=late), 3 * want, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("changed", [{"same_crop": False}, {"flip": 0.5}, {"rotate": 0.5}])
def test_views_of_the_gram_teacher_have_to_show_the_same_places(changed: dict[str, float]) -> None:
    large, sharp = View(size=16, flip=0), {"size": 32, "flip": 0, "same_crop": True}
    good, bad = View(**sharp), View(**(sharp | changed))  # type: ignore[arg-type]
    m = method(gram_start=1.0)
    m.check_crops([large, good, large, good, View(size=8)])
    with pytest.raises(UserError, match=r"^views: number 4 is the Gram teacher's view of number 3"):
        m.check_crops([large, good, large, bad, View(size=8)])


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((16, 32, 16, 24), "those of the Gram teacher, are not of one size"), ((16, 32, 8, 32), "expected one size")],
)
def test_views_of_other_sizes_are_refused(sizes: Sequence[int], said: str) -> None:
    with pytest.raises(UserError, match=f"^views: .*{said}"):
        method(gram_start=1.0).check_views(views(*sizes))


def test_a_gram_teacher_comes_before_its_loss() -> None:
    with pytest.raises(UserError, match=r"^method.gram_teacher=3: expected at most method.gram_start=2"):
        method(gram_start=2.0, gram_teacher=3.0)
