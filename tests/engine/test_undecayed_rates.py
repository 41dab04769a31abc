"""Tests of the rate of parameters without weight decay, such as biases and norms."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine import optim
from eagleray.engine.loop import Trainer
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.runs import recipe
from eagleray.runs.build import scaled_lr

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
NAMES = ("adamw", "lars", "larc", "lamb", "sgd")


class Squares(Method):
    """Its loss is the sum of the squares of the head's outputs for one view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(Backbone("vit_tiny_patch16_224", options=TINY), nn.Linear(24, 2))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        return {"loss": self.encoder(batch.views).pow(2).mean()}


def trained(
    name: str, scale: float, *, steps: int = 3, micro_batch: int | None = None, stop: int = 0
) -> dict[str, Tensor]:
    """Return how far each parameter moves; before the step `stop` a new optimiser takes the old one's state over."""
    method = Squares()
    method.encoder.backbone.micro_batch = micro_batch
    before = {n: p.detach().clone() for n, p in method.named_parameters()}
    views = torch.randn(steps, 4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    batches = [(Progress(i, steps, 1), Batch([x], torch.empty(4), torch.empty(4), (4,))) for i, x in enumerate(views)]
    state: dict[str, Any] | None = None
    for part in (batches[:stop], batches[stop:]):
        optimizer = optim.make(name, method, decay="matrices", undecayed_lr_scale=scale)
        assert len(optimizer.param_groups) == 2, "a group is one call of a kernel, whatever its rate"
        if state:
            optimizer.load_state_dict(state)
        list(Trainer(method, optimizer, lr=lambda _: 0.01, weight_decay=lambda _: 0.05).steps(part))
        state = copy.deepcopy(optimizer.state_dict())
    return {n: p.detach() - before[n] for n, p in method.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_vectors_move_by_their_share_of_a_step_and_matrices_by_all_of_it(name: str):
    alike, apart = trained(name, 1.0, steps=1), trained(name, 0.25, steps=1)
    tables = {n for n, step in alike.items() if step.ndim > 1}
    assert all(torch.equal(apart[n], alike[n]) for n in tables)
    for n in alike.keys() - tables:
        # LARC moves a norm's scale by a hundred-thousandth, of which a float32 near 1 keeps two digits.
        assert (apart[n] - 0.25 * alike[n]).norm() <= 0.03 * alike[n].norm(), n
    assert apart["encoder.head.bias"].norm() > 0


@pytest.mark.parametrize("name", ["lars", "adamw"])
def test_micro_batches_and_a_stop_change_nothing(name: str):
    whole, stopped, parts = trained(name, 0.25), trained(name, 0.25, stop=1), trained(name, 0.25, micro_batch=3)
    for n, step in whole.items():
        assert torch.equal(stopped[n], step), n
    if name == "lars":  # Adam divides gradients that are zero in truth by themselves
        for n, step in whole.items():
            torch.testing.assert_close(parts[n], step, rtol=1e-3, atol=1e-6, msg=n)


def test_barlow_twins_rates_are_those_of_its_authors():
    """0.2 and 0.0048 for a batch of 256, both to a thousandth along the same cosine."""
    chosen = recipe.load("barlow_twins_resnet50_in1k_ep1000")
    rate, scale = scaled_lr(chosen), chosen.optim.undecayed_lr_scale
    for epoch, share in ((5, 0.5), (10, 1.0), (505, 0.5005), (1000, 0.001)):
        value = rate(Progress(epoch, 1, 1000))
        assert value == pytest.approx(8 * 0.2 * share, rel=1e-6)
        assert value * scale == pytest.approx(8 * 0.0048 * share, rel=1e-6)


def test_it_is_a_factor_on_the_rates_of_layers():
    groups = optim.param_groups(Squares(), decay="matrices", layer_decay=0.5, undecayed_lr_scale=0.1)
    matrices = {group["lr_scale"] for group in groups if group["decay"]}
    assert matrices == {0.125, 0.25, 0.5, 1.0}
    assert {group["lr_scale"] for group in groups if not group["decay"]} == {0.1 * scale for scale in matrices}


def test_where_all_is_decayed_it_is_refused():
    got, expected = (
        "optim.undecayed_lr_scale=0.5: optim.decay=all decays every parameter",
        "optim.decay=matrices or timm",
    )
    with pytest.raises(UserError, match=f"^{re.escape(f'{got}; expected {expected}')}$"):
        optim.make("lars", Squares(), decay="all", undecayed_lr_scale=0.5)
