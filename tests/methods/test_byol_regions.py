"""Tests of BYOL with regions: each of the two losses equals the one computed alone."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from helpers.golden_cases import vit
from torch import Tensor

from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.methods.byol import BYOL
from eagleray.methods.byol_regions import BYOLRegions

AT = Progress(30, steps_per_epoch=3, epochs=20)


def small(**keys: Any) -> BYOLRegions:
    torch.manual_seed(0)
    m = BYOLRegions(
        vit(16, 4, 24, depth=1, heads=3), dim=8, hidden=16, prototypes=20, region_hidden=16, bottleneck=8, **keys
    )
    for p in m.target.parameters():  # no longer the online network's
        p.add_(0.05 * torch.randn_like(p))
    m.region_center.normal_(std=0.1)
    return m


def batch(same: bool = False) -> Batch:
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(4, 3, 16, 16, generator=g) for _ in range(2)]
    none = torch.empty(0)
    return Batch([x[0], x[0] if same else x[1]], index=none, label=none, rows=(4,))


def test_views_lose_what_they_lose_in_byol() -> None:
    ours = small(region_weight=0.25)
    torch.manual_seed(0)
    byol = BYOL(vit(16, 4, 24, depth=1, heads=3), dim=8, hidden=16)
    byol.load_state_dict({n: x for n, x in ours.state_dict().items() if "region" not in n})
    out = ours(batch(), AT)
    torch.testing.assert_close(out["view"], byol(batch(), AT)["loss"])
    torch.testing.assert_close(out["loss"], out["view"] + 0.25 * out["region"])


def test_regions_lose_what_they_lose_in_esvit() -> None:
    m = small()
    want = torch.zeros(())
    for z_s, z_t in matched(m):
        y_s = m.online.region_head.last(m.online.region_head(z_s))
        y_t = m.target.region_head.last(m.target.region_head(z_t))
        p = F.softmax((y_t - m.region_center) / m.teacher_temp(AT), dim=1)
        want = want - (p * F.log_softmax(y_s / m.student_temp, dim=1)).sum(1).mean() / 8
    center = m.region_center.clone()
    out = m(batch(), AT)
    torch.testing.assert_close(out["region"], want, rtol=1e-4, atol=1e-5)
    assert not torch.equal(m.region_center, center)
    out["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in m.online.region_head.parameters() if p.requires_grad)
    assert all(p.grad is None for p in m.target.parameters())
    m.before_step(Progress(0, steps_per_epoch=3, epochs=20))
    assert {n for n, p in m.online.region_head.named_parameters() if p.grad is None} >= {
        n for n, _ in m.online.region_head.named_parameters() if n.startswith("last.")
    }


def test_as_squared_distance_tokens_are_predicted_as_views_are() -> None:
    m = small(region_loss="mse").eval()  # batch norm of a token does not depend on the others
    want = [(m.region_predictor(m.online.region_head(s)), m.target.region_head(t)) for s, t in matched(m)]
    far = [(F.normalize(p, dim=1) - F.normalize(z, dim=1)).square().sum(1).mean() for p, z in want]
    out = m(batch(), AT)
    torch.testing.assert_close(out["region"], torch.stack(far).mean())
    out["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in m.region_predictor.parameters())
    assert all(p.grad is None for p in m.target.parameters())


def matched(m: BYOLRegions) -> Iterator[tuple[Tensor, Tensor]]:
    """The online network's tokens (N, D) of each image and view, with the target's that are most similar to them."""
    for q, v in ((0, 1), (1, 0)):
        s, t = m.online.backbone(batch().views[v]).patches, m.target.backbone(batch().views[q]).patches
        for z_s, z_t in zip(s, t, strict=True):
            yield z_s, z_t[F.cosine_similarity(z_s.unsqueeze(1), z_t, dim=2).argmax(1)]


def test_one_vector_for_all_tokens_does_not_win() -> None:
    """Without a predictor all tokens get one vector in these steps: its mean then has 0.81 of the length."""
    m = small(region_loss="mse", region_weight=10.0, momentum=Schedule(value=0.9))
    optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=3e-3)
    for step in range(60):
        at = Progress(step, steps_per_epoch=60, epochs=1)
        optimizer.zero_grad()
        m(batch(), at)["loss"].backward()
        m.before_step(at)
        optimizer.step()
        m.after_step(at)
    tokens = F.normalize(m.target.region_head(m.target.backbone(batch().views[0]).patches.flatten(0, 1)), dim=1)
    assert tokens.mean(0).norm() < 0.6
