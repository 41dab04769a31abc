"""Tests of BYOL with regions: each of the two losses equals the one computed alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.golden_cases import vit
from torch import Tensor

from eagleray.config.schedule import Progress
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


@pytest.mark.parametrize("kind", ["softmax", "mse"])
def test_regions_lose_what_they_lose_in_esvit(kind: str) -> None:
    m = small(region_loss=kind)
    want = torch.zeros(())
    for q, v in ((0, 1), (1, 0)):
        s, t = m.online.backbone(batch().views[v]).patches, m.target.backbone(batch().views[q]).patches
        for z_s, z_t in zip(s, t, strict=True):  # (N, D) of one image
            j = F.cosine_similarity(z_s.unsqueeze(1), z_t, dim=2).argmax(1)
            y_s = m.online.region_head.last(m.online.region_head(z_s))
            y_t = m.target.region_head.last(m.target.region_head(z_t[j]))
            want = want + far(kind, y_s, y_t, m) / 8
    center = m.region_center.clone()
    out = m(batch(), AT)
    torch.testing.assert_close(out["region"], want, rtol=1e-4, atol=1e-5)
    assert not torch.equal(m.region_center, center)
    out["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in m.online.region_head.parameters() if p.requires_grad)
    assert all(p.grad is None for p in m.target.parameters())


def far(kind: str, s: Tensor, t: Tensor, m: BYOLRegions) -> Tensor:
    if kind == "mse":
        return (F.normalize(s, dim=1) - F.normalize(t, dim=1)).square().sum(1).mean()
    p = F.softmax((t - m.region_center) / m.teacher_temp(AT), dim=1)
    return -(p * F.log_softmax(s / m.student_temp, dim=1)).sum(1).mean()
