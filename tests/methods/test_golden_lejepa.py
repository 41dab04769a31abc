"""Tests of LeJEPA: properties of its loss, and golden vectors computed from the paper's equations in numpy."""

from pathlib import Path

import pytest
import torch
from helpers.commands import refused
from helpers.golden_cases import Case, cases, vit
from helpers.recipes import small_recipe

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.losses.sigreg import directions, sigreg
from eagleray.methods.lejepa import LeJEPA, prediction

AT = Progress(step=3, steps_per_epoch=10, epochs=2)


@cases("lejepa_loss")
def test_loss(case: Case):
    """The gradients are by hand, checked against finite differences."""
    h, z = case.hyper, case["z"].requires_grad_()
    sim = prediction(z, h["global_views"])
    gaussian = sigreg(z, case["directions"], (z.shape[1],), reach=h["t_max"])
    loss = (1 - h["lambda"]) * sim + h["lambda"] * gaussian
    loss.backward()
    case.check(sim, "prediction")
    case.check(gaussian, "sigreg")
    case.check(loss, "loss")
    case.check(z.grad, "grad_z")


def test_every_view_predicts_every_global_one():
    """Equation 5, which has a sum over channels, but for what does not depend on the predicting view (6)."""
    z = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
    mean = z[:2].mean(0)
    pairs = torch.stack([(z[v] - z[w]).square().mean() for v in range(2) for w in range(5)]).mean()
    torch.testing.assert_close(prediction(z, 2), pairs - (z[:2] - mean).square().mean())
    assert prediction(z[:1].expand(3, -1, -1), 2) == 0


def method_of(**keys: object) -> LeJEPA:
    torch.manual_seed(0)
    return LeJEPA(vit(8, 4, 12, 1, 2), embedding=10, hidden=14, dim=6, slices=9, **keys)  # type: ignore[arg-type]


def test_global_views_are_the_large_ones_and_lambda_weighs():
    large, small = torch.randn(3, 7, 3, 8, 8), torch.randn(2, 7, 3, 4, 4)
    batch = Batch([*large, *small], torch.empty(0), torch.empty(0), (7,))
    method = method_of(weight=0.2, reach=4.0)
    out = method(batch, AT)
    out["loss"].backward()
    z = method.encoder(batch.views).unflatten(0, (5, 7))
    gaussian = sigreg(z, directions(6, 9, AT.step, torch.device("cpu")), (7,), reach=4.0)
    torch.testing.assert_close(out["loss"], 0.8 * prediction(z, 3) + 0.2 * gaussian)
    torch.testing.assert_close(out["prediction"], prediction(z, 3))
    torch.testing.assert_close(out["sigreg"], gaussian)
    assert all(p.grad is not None for p in method.parameters())


def test_the_projector_is_that_of_the_code():
    """A linear layer, then an MLP with batch norm, all with biases: the last one moves the mean to zero."""
    linear = [m for m in method_of().encoder.head if isinstance(m, torch.nn.Linear)]
    assert [m.out_features for m in linear] == [10, 14, 14, 6]
    assert all(m.bias is not None for m in linear)


def test_a_small_view_first_is_refused():
    with pytest.raises(UserError, match=r"views: sizes of \[4, 8\] pixels; lejepa expects the largest"):
        method_of().check_views([torch.empty(2, 3, 4, 4), torch.empty(2, 3, 8, 8)])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("method.weight=2", "method.weight: input should be less than or equal to 1"),
        ("method.slices=0", "method.slices: input should be greater than 0"),
        ("method.reach=0", "method.reach: input should be greater than 0"),
        ("method.embedding=x", "method.embedding: input should be a valid integer"),
        ("views=[{size: 8}, {size: 16}]", "views: sizes of [8, 16] pixels; lejepa expects the largest"),
        ("views=[{size: 16}]", "views: got 1, but lejepa works with 2 to 100"),
    ],
)
def test_wrong_keys_are_one_line(shards: Path, key: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (path := tmp_path / "small.yaml").write_text(small_recipe("lejepa"))
    data = f"data.train={shards / 'train'}"
    assert said in refused(capsys, "pretrain", str(path), data, f"out={tmp_path / 'out'}", key)
