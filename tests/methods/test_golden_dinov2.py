"""DINOv2 against the authors' code, github.com/facebookresearch/dinov2: its loss classes were run on random scores."""

import torch
from helpers.golden_cases import Case, cases, vit

from eagleray.losses.koleo import koleo_loss
from eagleray.losses.masked import masks_of
from eagleray.losses.prototypes import H, Scores, probabilities
from eagleray.losses.sinkhorn import sinkhorn_center
from eagleray.methods.dinov2 import ITERATIONS, DINOv2


@cases("dinov2_sinkhorn")
def test_targets(case: Case) -> None:
    t, tau = case["teacher"], case.hyper["teacher_temp"]
    axes = torch.eye(t.shape[1])
    assert case.hyper["n_iterations"] == ITERATIONS
    center = sinkhorn_center(Scores(t, axes), tau, ITERATIONS)
    for name in ("targets", "patch_targets"):
        case.check(probabilities(t, axes, center, tau), name)


@cases("dinov2_patch_loss")
def test_loss_of_patches(case: Case) -> None:
    h = case.hyper
    masks = masks_of(case["mask"].numpy(), torch.device("cpu"))
    s, axes = case["student"].requires_grad_(), torch.eye(case["student"].shape[2])
    t_hidden = Scores(case["teacher"].flatten(0, 1)[masks.rows], axes)
    s_hidden = Scores(s.flatten(0, 1)[masks.rows], axes)
    method = DINOv2(
        vit(8, 4, 4, depth=1, heads=1),
        prototypes=len(axes),
        patch_prototypes=None,
        centering=h["centering"],
        center_momentum=h["center_momentum"],
    )
    method.patch_center.copy_(case["center_before"])
    _, center = method.centers(t_hidden, t_hidden, h["teacher_temp"])
    case.check(probabilities(t_hidden.z, axes, center, h["teacher_temp"]), "targets")
    loss = H(t_hidden, s_hidden, masks.pairs, center, h["teacher_temp"], h["student_temp"])
    loss.backward()
    case.check(loss, "loss")
    case.check(s.grad, "grad_student")
    if h["centering"] == "mean":
        images = Scores(torch.zeros(2 * h["batch"], len(axes)), axes)
        method.update_centers(images, t_hidden, (h["batch"],))
        case.check(method.patch_center, "center_after")


@cases("dinov2_koleo")
def test_koleo(case: Case) -> None:
    x = case["x"].requires_grad_()
    loss = koleo_loss(x, (len(x),))
    loss.backward()
    case.check(loss, "loss")
    case.check(x.grad, "grad")
