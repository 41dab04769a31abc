"""Tests of BYOL: properties of its loss and target network, and golden vectors of solo-learn's byol_loss_func."""

import pytest
import torch
from helpers.golden_cases import Case, cases, vit

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.methods.byol import BYOL, distance


@pytest.mark.parametrize(("cosine", "want"), [(1, 0), (0, 2), (-1, 4)])
def test_distance_of_unit_vectors(cosine: int, want: int):
    p, across = torch.eye(6)[:3], torch.eye(6)[3:]
    z = cosine * p if cosine else across
    torch.testing.assert_close(distance(3 * p, 0.2 * z), torch.tensor(float(want)))


def small() -> tuple[BYOL, Batch]:
    torch.manual_seed(0)
    method = BYOL(vit(8, 4, 12, 1, 2), dim=6, hidden=10, momentum=Schedule(value=0.75, end=1.0))
    x = torch.randn(2, 5, 3, 8, 8)
    return method, Batch(list(x), torch.empty(0), torch.empty(0), (5,))


def test_the_target_teaches_the_other_view():
    method, batch = small()
    with torch.no_grad():
        for p in method.target.parameters():
            p.add_(0.1 * torch.randn_like(p))
    out = method(batch, Progress(0, 10, 2))["loss"]
    out.backward()
    x1, x2 = batch.views
    # Each view on its own: batch norm must not mix them.
    p1, p2 = (method.predictor(method.online([x])) for x in (x1, x2))
    z1, z2 = (method.target([x]) for x in (x1, x2))
    torch.testing.assert_close(out, distance(p1, z2) + distance(p2, z1))
    learns = {n for n, p in method.named_parameters() if p.grad is not None}
    assert learns == {n for n, _ in method.named_parameters() if not n.startswith("target.")}


def test_small_crops_predict_both_targets():
    method, batch = small()
    crops = torch.randn(3, 5, 3, 4, 4)
    whole = Batch([*batch.views, *crops], batch.index, batch.label, batch.rows)
    out = method(whole, Progress(0, 10, 2))["loss"]
    p = [method.predictor(method.online([x])) for x in whole.views]
    z = [method.target([x]) for x in whole.views[:2]]
    pairs = [distance(p[0], z[1]), distance(p[1], z[0]), *(distance(pv, zi) for pv in p[2:] for zi in z)]
    torch.testing.assert_close(out, 2 * torch.stack(pairs).mean())
    assert len(pairs) == 8


def test_the_target_follows_after_the_step():
    method, batch = small()
    start = {n: p.clone() for n, p in method.online.named_parameters()}
    with torch.no_grad():
        for p in method.online.parameters():
            p.add_(1)
    method(batch, Progress(0, 10, 2))
    for n, p in method.target.named_parameters():
        assert torch.equal(p, start[n])
    method.after_step(Progress(0, 10, 2))
    for n, p in method.target.named_parameters():
        torch.testing.assert_close(p, start[n] + 0.25)
    method.after_step(Progress(20, 10, 2))  # the end, at momentum 1
    for n, p in method.target.named_parameters():
        torch.testing.assert_close(p, start[n] + 0.25)
    assert method.export() is method.online.backbone


def test_outputs_have_no_batch_norm():
    method, _ = small()
    for net in (method.online.head, method.predictor, method.target.head):
        assert [type(m).__name__ for m in net] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]


@cases("byol_loss")
def test_loss(case: Case):
    p1, p2, z1, z2 = (case[n].requires_grad_() for n in ("p1", "p2", "z1", "z2"))
    loss = distance(p1, z2) + distance(p2, z1)
    loss.backward()
    case.check(loss, "loss")
    case.check(p1.grad, "grad_p1")
    case.check(p2.grad, "grad_p2")
    assert z1.grad is None
    assert z2.grad is None
