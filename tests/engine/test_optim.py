"""Tests of the optimisers: their steps, skipped steps, and the groups of parameters."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine import optim
from eagleray.engine.loop import Trainer
from eagleray.methods.ibot import IBOT
from eagleray.methods.method import Method
from eagleray.methods.mpp import MPP
from eagleray.models.backbone import Backbone, Encoder

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
NAMES = ("adamw", "lars", "larc", "lamb", "sgd")


class Two(nn.Module):
    """A method with two parts, which have matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
        self.predictor = nn.Linear(4, 3)


def made(name: str, **settings: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    method = Two()
    optimizer = optim.make(name, method, decay="all", **settings)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.1, 0.05
    return list(method.parameters()), optimizer


def step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, number: int, found: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) if not found else torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.tensor(found)
    optimizer.step()


def state(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x.clone() for p in params for x in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_skipped_step_changes_nothing(name: str, skipped: int):
    params, optimizer = made(name)
    expected_params, expected = made(name)
    for number in range(4):
        if number == skipped:
            step(params, optimizer, number, found=1.0)
            assert all(map(torch.equal, params, expected_params))
        step(params, optimizer, number)
        step(expected_params, expected, number)
    after = zip(state(params, optimizer), state(expected_params, expected), strict=True)
    assert all(torch.equal(a, b) for a, b in after)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_goes_on_the_same(name: str):
    params, optimizer = made(name)
    step(params, optimizer, 0)
    saved, kept = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    step(params, optimizer, 1)
    others, again = made(name)
    again.load_state_dict(saved)
    for p, value in zip(others, kept, strict=True):
        p.data.copy_(value)
    step(others, again, 1)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize(("name", "trust"), [("lars", 1e-3), ("lamb", 1.0)])
def test_a_matrix_moves_by_a_share_of_its_length_however_large_the_gradient(name: str, trust: float):
    for scale in (1.0, 1e4):
        params, optimizer = made(name)
        before = [p.detach().clone() for p in params]
        for p, g in zip(params, before, strict=True):
            p.grad = scale * torch.randn_like(g)
        optimizer.step()
        for p, old in zip(params, before, strict=True):
            if p.ndim > 1:
                assert (p - old).norm().item() == pytest.approx(0.1 * trust * old.norm().item(), rel=1e-3)


def test_lars_leaves_the_gradients_of_vectors_alone():
    params, optimizer = made("lars")
    vectors = [p for p in params if p.ndim == 1]
    before = [p.detach().clone() for p in vectors]
    step(params, optimizer, 0)
    for p, old in zip(vectors, before, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * p.grad)


def test_lamb_is_that_of_timm_on_matrices_and_adam_on_vectors():
    params, optimizer = made("lamb")
    others = [nn.Parameter(p.detach().clone()) for p in params]
    matrices, vectors = [p for p in others if p.ndim > 1], [p for p in others if p.ndim == 1]
    known = [
        timm.optim.Lamb(matrices, lr=0.1, weight_decay=0.05, max_grad_norm=None, eps=1e-6),
        torch.optim.Adam(vectors, lr=0.1, eps=1e-6),
    ]
    for number in range(5):
        step(params, optimizer, number)
        for p, other in zip(params, others, strict=True):
            other.grad = p.grad.clone()
        for o in known:
            o.step()
    for p, other in zip(params, others, strict=True):
        torch.testing.assert_close(p, other, rtol=1e-5, atol=1e-6)


def larc_step(p: Tensor, g: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return a parameter and its momentum after a step of LARC, written from its definition."""
    size, length = p.norm().item(), g.norm().item()
    if size and length:
        g = 1e-3 * size / (length + 0.05 * size + 1e-8) * (g + 0.05 * p)
    kept = 0.9 * kept + g
    return p - 0.1 * kept, kept


def test_larc_is_its_definition_for_matrices_vectors_and_zeros():
    params, optimizer = made("larc")
    nn.init.zeros_(params[1])
    expected = [(p.detach().clone(), torch.zeros_like(p)) for p in params]
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = 0.1 * torch.randn(p.shape, generator=generator)
        if number == 2:
            params[0].grad.zero_()  # neither decayed nor scaled, but carried on by the momentum
        expected = [larc_step(p, q.grad, kept) for (p, kept), q in zip(expected, params, strict=True)]
        optimizer.step()
        for q, (p, _) in zip(params, expected, strict=True):
            torch.testing.assert_close(q.detach(), p)
    assert 0 < (params[2] - 1).norm() < 1e-2, "the layer norm's scale moves by a share of its length"


@pytest.mark.parametrize("name", ["lars", "larc", "lamb"])
def test_a_matrix_of_zeros_moves_by_the_plain_step(name: str):
    method = nn.Linear(3, 2)
    nn.init.zeros_(method.weight)
    optimizer = optim.make(name, method, decay="all")
    optimizer.param_groups[0]["lr"] = 0.1
    method.weight.grad = torch.ones(2, 3)
    optimizer.step()
    torch.testing.assert_close(method.weight.detach(), torch.full((2, 3), -0.1))


@pytest.mark.parametrize("name", ["lars", "sgd"])
def test_momentum_is_the_recipes(name: str):
    for momentum in (0.0, 0.5):
        params, optimizer = made(name, momentum=momentum)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        bias = next(p for p in params if p.ndim == 1)
        at = [bias.detach().clone()]
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            at.append(bias.detach().clone())
        torch.testing.assert_close(at[1] - at[2], (1 + momentum) * (at[0] - at[1]))


def test_the_average_of_squared_gradients_is_as_slow_as_the_recipe_says():
    for beta2 in (0.999, 0.95):
        params, optimizer = made("adamw", beta2=beta2)
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        optimizer.step()
        for p in params:
            torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], torch.full_like(p, 4 * (1 - beta2)))


def test_groups_hold_every_parameter_once():
    method = Two()
    method.encoder[0].weight.requires_grad_(False)
    groups = optim.param_groups(method, decay="matrices", constant=["predictor"], constant_lr=0.3)
    held = [p for g in groups for p in g["params"]]
    assert {id(p) for p in held} == {id(p) for p in method.parameters() if p.requires_grad}
    assert len(held) == len({id(p) for p in held})
    still = {id(p) for g in groups for p in g["params"] if g.get("constant_lr") == 0.3}
    assert still == {id(p) for p in method.predictor.parameters()}
    decayed = {id(p) for g in groups for p in g["params"] if g["decay"]}
    assert decayed == {id(method.predictor.weight)}


def test_a_constant_part_that_there_is_not():
    with pytest.raises(
        UserError,
        match=r"optim.constant_lr=\['predictr'\]: expected parts of the method: encoder, predictor",
    ):
        optim.make("sgd", Two(), decay="all", constant=["predictr"])


class Toy(Method):
    def __init__(self) -> None:
        super().__init__()
        self.two = Two()
        self.encoder, self.predictor = self.two.encoder, self.two.predictor
        del self.two

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        return {"loss": self.predictor(self.encoder(batch.views[0])).square().mean()}


@pytest.mark.parametrize("name", NAMES)
def test_fit_leaves_the_rate_of_a_constant_part(name: str):
    def moved(lr: Callable[[Progress], float]) -> dict[str, float]:
        method, none = Toy(), torch.empty(0)
        before = {n: p.detach().clone() for n, p in method.named_parameters()}
        optimizer = optim.make(name, method, decay="all", constant=("predictor",), constant_lr=0.1)
        torch.manual_seed(1)
        batches = [(Progress(0, 1, 1), Batch([torch.randn(8, 5)], none, none, (8,)))]
        for _ in Trainer(method, optimizer, lr=lr, weight_decay=lambda _: 0.0).steps(batches):
            pass
        return {n: (p - before[n]).norm().item() for n, p in method.named_parameters()}

    at_rest, at_work = moved(lambda _: 0.0), moved(lambda _: 0.2)
    for n in at_rest:
        assert at_work[n] > 0
        assert at_rest[n] == (at_work[n] if n.startswith("predictor.") else 0.0)


def rates(method: nn.Module, groups: list[dict[str, Any]]) -> dict[str, float]:
    found = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    return {name: found[id(p)] for name, p in method.named_parameters()}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet50"])
def test_what_timms_models_name_is_not_decayed(name: str):
    """The groups are compared with timm's; position tables are matrices, Swin's relative ones too."""
    method = nn.Module()
    method.encoder = Encoder(Backbone(name), nn.Linear(2, 2))
    model = method.encoder.backbone.model
    named = getattr(model, "no_weight_decay", set)()
    [spared, _] = timm.optim.param_groups_weight_decay(model, 0.1, no_weight_decay_list=named)
    ours = optim.param_groups(method, decay="timm")
    left = {id(p) for g in ours if not g["decay"] for p in g["params"]} - {id(method.encoder.head.bias)}
    assert left == {id(p) for p in spared["params"]}
    tables = {"vit_tiny_patch16_224": 2, "swin_tiny_patch4_window7_224": 12, "resnet50": 0}
    assert sum(p.ndim > 1 for p in spared["params"]) == tables[name]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "resnet50"])
def test_layers_learn_at_timms_rates(name: str):
    """The learning rates are compared with those of timm's groups for the same model with a head."""
    method = nn.Module()
    method.encoder = Encoder(Backbone(name), nn.Linear(2, 2))
    theirs = timm.create_model(name, num_classes=2)
    groups = timm.optim.param_groups_layer_decay(theirs, layer_decay=0.7)
    want = {f"encoder.backbone.model.{n}": scale for n, scale in rates(theirs, groups).items()}
    ours = rates(method, optim.param_groups(method, decay="matrices", layer_decay=0.7))
    assert ours.pop("encoder.head.weight") == ours.pop("encoder.head.bias") == 1
    assert ours == pytest.approx({n: scale for n, scale in want.items() if n in ours})
    assert len(set(ours.values())) > 10


def test_the_token_of_hidden_patches_learns_as_the_class_token_does():
    """DINOv2's code counts both to the layer below the blocks."""
    method = IBOT(Backbone("vit_tiny_patch16_224", options=TINY), prototypes=8, hidden=8, bottleneck=4)
    groups = optim.param_groups(method, decay="matrices", layer_decay=0.5)
    found = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    student = method.student
    assert found[id(student.mask_token)] == found[id(student.backbone.model.cls_token)] == 0.5**3
    assert found[id(student.head.mlp[0].weight)] == 1
    predicting = MPP(Backbone("vit_tiny_patch16_224", options=TINY))
    groups = optim.param_groups(predicting, decay="matrices", layer_decay=0.5)
    found = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert found[id(predicting.mask_token)] == found[id(predicting.encoder.backbone.model.cls_token)] == 0.5**3


@pytest.mark.parametrize("name", ["cvt_13", "t2t_vit_14", "pvt_small", "vil_tiny", "cvt_tiny_esvit"])
def test_layers_of_our_own_models(name: str):
    """Every block is a layer of its own, in order, and only parameters beside the blocks have none."""
    with torch.device("meta"):
        backbone = Backbone(name)
    found = {n.removeprefix(".model."): s for n, s in optim.layer_lr_scales(backbone, 0.5).items()}
    blocks: dict[str, set[float]] = {}
    for n, scale in found.items():
        if block := re.match(r"(stages\.\d+\.(?:blocks\.)?|blocks\.)\d+\.", n):
            blocks.setdefault(block[0], set()).add(scale)
    assert all(len(of) == 1 for of in blocks.values())
    order = [min(of) for of in blocks.values()]
    assert order == sorted(order)
    assert max(found.values()) == 0.5
    depth = {"cvt_13": 16, "t2t_vit_14": 15, "pvt_small": 20, "vil_tiny": 16, "cvt_tiny_esvit": 16}
    assert len(set(found.values())) == depth[name]  # with what a stage, or the model, begins with


class OfOneView(Method):
    """Its loss is the sum of the head's outputs, each to a power."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power
        self.encoder = Encoder(Backbone("vit_tiny_patch16_224", options=TINY), nn.Linear(24, 2))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        return {"loss": self.encoder(batch.views).pow(self.power).sum()}


def test_a_layer_learns_at_its_share_of_the_rate():
    method = OfOneView(1)
    before = {n: p.detach().clone() for n, p in method.named_parameters()}
    optimizer = optim.make("sgd", method, decay="all", momentum=0.0, layer_decay=0.5)
    batch = Batch([torch.randn(2, 3, 16, 16)], torch.empty(2), torch.empty(2), (2,))
    method(batch, Progress(0, 1, 1))["loss"].backward()
    grads = {n: p.grad.clone() for n, p in method.named_parameters()}
    method.zero_grad()
    list(Trainer(method, optimizer, lr=lambda _: 0.1, weight_decay=lambda _: 0.0).steps([(Progress(0, 1, 1), batch)]))
    shares = {"patch_embed": 0.125, "blocks.0.": 0.25, "blocks.1.": 0.5, "head.": 1.0}
    for name, p in method.named_parameters():
        share = next((s for part, s in shares.items() if part in name), None)
        if share:
            torch.testing.assert_close(p.detach(), before[name] - 0.1 * share * grads[name], msg=name)


def test_the_gradient_of_the_patch_projection_has_a_limit_of_its_own():
    def moved(clip_patch: float | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        method = OfOneView(2)
        before = {n: p.detach().clone() for n, p in method.named_parameters()}
        optimizer = optim.make("sgd", method, decay="all", momentum=0.0)
        batch = Batch([torch.randn(2, 3, 16, 16)], torch.empty(2), torch.empty(2), (2,))
        keys: dict[str, Any] = {"lr": lambda _: 1.0, "weight_decay": lambda _: 0.0, "clip_patch": clip_patch}
        [step] = Trainer(method, optimizer, **keys).steps([(Progress(0, 1, 1), batch)])
        norms.append(step.norms)
        return {n: p.detach() - before[n] for n, p in method.named_parameters()}

    norms: list[Tensor] = []
    free, limited = moved(None), moved(1e-3)
    torch.testing.assert_close(norms[0], norms[1])  # as reported, before any limit
    patch = [n for n in free if "patch_embed" in n]
    assert len(patch) == 2
    assert torch.cat([free[n].flatten() for n in patch]).norm() > 1e-2
    assert torch.cat([limited[n].flatten() for n in patch]).norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert all(torch.equal(free[n], limited[n]) for n in free if n not in patch)


def test_layers_that_nobody_knows_are_refused():
    with torch.device("meta"):
        backbone = Backbone("vit_tiny_patch16_224")
    backbone.model = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"optim.layer_decay=0.5: timm does not define the layers of Linear"):
        optim.param_groups(backbone, decay="all", layer_decay=0.5)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_moments_that_were_read_are_laid_out_as_their_weights(name: str) -> None:
    """As when a run with batch norm goes on from a checkpoint that has contiguous rows."""
    weights = []
    for strided in (False, True):
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = optim.make(name, conv, decay="all", momentum=0.9)
        optimizer.param_groups[0]["lr"] = 0.1
        for step in range(2):
            conv.zero_grad()
            conv(torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            if strided:
                for state in optimizer.state.values():
                    state |= {k: v.contiguous() if v.dim() == 4 else v for k, v in state.items()}
                optim.lay_out_moments(optimizer)
        weights.append(conv.weight.detach().clone())
    assert weights[0].equal(weights[1])
