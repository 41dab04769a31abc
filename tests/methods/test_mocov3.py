"""Tests of MoCo v3's variants: ResNet-50's heads, no batch norm, no predictor, no momentum."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.golden_cases import vit
from torch import nn

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.methods.mocov3 import MoCoV3, ctr
from eagleray.runs.recipe import Recipe

AT = Progress(step=3, steps_per_epoch=10, epochs=2)


def made(**settings: Any) -> MoCoV3:
    torch.manual_seed(0)
    return MoCoV3(vit(8, 4, 8, depth=1, heads=1), dim=4, hidden=16, **settings)


def pair(rows: int = 6) -> Batch:
    generator, none = torch.Generator().manual_seed(0), torch.empty(0)
    views = [torch.randn(rows, 3, 8, 8, generator=generator) for _ in range(2)]
    return Batch(views, index=none, label=none, rows=(rows,))


def linears(head: nn.Module) -> int:
    return sum(isinstance(m, nn.Linear) for m in head.modules())


def norms(head: nn.Module) -> list[bool]:
    """Return whether each batch norm has a scale and a shift."""
    return [m.affine for m in head.modules() if isinstance(m, nn.BatchNorm1d)]


@pytest.mark.parametrize(
    ("heads", "layers", "projector", "predictor"),
    [("vit", 3, [True, True, False], [True, False]), ("r50", 2, [True, False], [True])],
)
def test_heads(heads: Any, layers: int, projector: list[bool], predictor: list[bool]):
    m = made(heads=heads)
    assert (linears(m.base_encoder.head), linears(m.predictor)) == (layers, 2)
    assert (norms(m.base_encoder.head), norms(m.predictor)) == (projector, predictor)


@pytest.mark.parametrize("heads", ["vit", "r50"])
def test_no_momentum_makes_the_keys_those_of_the_online_encoder(heads: Any):
    m, batch = made(heads=heads, momentum=Schedule(value=0.0)), pair()
    with torch.no_grad():
        for p in m.base_encoder.parameters():
            p.add_(torch.randn_like(p))
    loss = m(batch, AT)["loss"]
    assert all(map(torch.equal, m.base_encoder.parameters(), m.momentum_encoder.parameters()))
    z1, z2 = (m.base_encoder([x]) for x in batch.views)
    expected = sum(ctr(m.predictor(z), k.detach(), m.temperature, batch.rows) for z, k in ((z1, z2), (z2, z1)))
    torch.testing.assert_close(loss, expected)


def test_without_predictor_a_query_is_a_projection():
    m, batch = made(predictor=False, momentum=Schedule(value=0.0)), pair()
    assert not list(m.predictor.parameters())
    z1, z2 = (m.base_encoder([x]) for x in batch.views)
    one, two = (ctr(a, b, m.temperature, batch.rows) for a, b in ((z1, z2), (z2, z1)))
    torch.testing.assert_close(m(batch, AT)["loss"], one + two)


def test_without_norm_an_image_knows_nothing_of_the_others():
    for norm in (True, False):
        m, x = made(norm=norm).train(), pair().views[0]
        alone, together = m.predictor(m.base_encoder([x[:2]])), m.predictor(m.base_encoder([x]))[:2]
        assert torch.allclose(alone, together, atol=1e-5) == (not norm)
        assert bool(norms(m)) == norm
        assert all((layer.bias is None) == norm for layer in m.predictor if isinstance(layer, nn.Linear))


def norm_batches(m: MoCoV3, batch: Batch) -> dict[str, list[int]]:
    """Return how many images each batch norm of a step saw at a time, by its name."""
    seen: dict[str, list[int]] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, x, name=name: seen.setdefault(name, []).append(len(x[0])))
        for name, layer in m.named_modules()
        if isinstance(layer, nn.BatchNorm1d)
    ]
    m(batch, AT)
    for hook in hooks:
        hook.remove()
    return seen


def test_both_crops_are_in_one_batch_norm_or_each_apart():
    for joint, sizes in ((False, [6, 6]), (True, [12])):
        m = made(joint_norm=joint)
        seen = norm_batches(m, pair())
        assert len(seen) == 8, "three in each projector, two in the predictor"
        assert all(counts == sizes for counts in seen.values())


def test_the_statistics_of_both_crops_together_are_those_of_all_images():
    """The second crop is far from the first, so that each apart has another mean and variance than both together."""
    batch = pair()
    batch = dataclasses.replace(batch, views=[batch.views[0], 3 * batch.views[1] + 2])
    apart, joint = made(momentum=Schedule(value=0.0)), made(momentum=Schedule(value=0.0), joint_norm=True)
    x = torch.cat(batch.views)
    z = joint.base_encoder.head(joint.base_encoder.backbone.pooled(x))
    q, k = joint.predictor(z).chunk(2), z.detach().chunk(2)
    want = sum(ctr(q[i], k[1 - i], joint.temperature, batch.rows) for i in (0, 1))
    losses = [m(batch, AT)["loss"] for m in (apart, joint)]
    torch.testing.assert_close(losses[1], want)
    assert (losses[0] - losses[1]).abs() > 1e-2


def test_joint_norm_changes_nothing_without_batch_norm():
    apart, joint = (made(norm=False, joint_norm=on)(pair(), AT)["loss"] for on in (False, True))
    torch.testing.assert_close(apart, joint)


@pytest.mark.parametrize(
    "settings", [{}, {"heads": "r50"}, {"norm": False}, {"predictor": False}, {"joint_norm": True}]
)
def test_every_variant_learns_in_all_that_is_trained(settings: dict[str, Any]):
    m = made(**settings)
    m(pair(), AT)["loss"].backward()
    assert all(p.grad is not None for n, p in m.named_parameters() if not n.startswith("momentum_encoder."))
    assert all(p.grad is None for p in m.momentum_encoder.parameters())


def test_gain_is_zero_where_all_images_are_alike():
    m = made()
    alike = dataclasses.replace(pair(), views=[v[:1].expand_as(v) for v in pair().views])
    for mlp in (m.base_encoder.head, m.predictor, m.momentum_encoder.head):
        mlp.eval()  # batch norm would blow up what rounding leaves of a difference
    assert m(alike, AT)["gain"].item() == pytest.approx(0, abs=1e-5)
    assert m(pair(), AT)["gain"].item() != pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("wrong", ["dim: 0", "temperature: 0", "heads: r18", "hidden: -1"])
def test_wrong_settings_are_named(wrong: str):
    key, value = wrong.split(": ")
    tree = {"method": {"name": "mocov3", key: value}, "views": [{"size": 32}]}
    with pytest.raises(UserError, match=rf"method\.{key}: "):
        config.check(Recipe, tree, "r")
