"""Tests that every method has to pass."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.recipes import CNN_ONLY, METHODS, VIT_ONLY, small_recipe
from helpers.table import Table

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.config.view import View
from eagleray.data.batch import Batch, whole_boxes
from eagleray.engine.loop import Trainer
from eagleray.methods.method import Method
from eagleray.models.backbone import encoder_with
from eagleray.runs.build import build_method, build_optimizer
from eagleray.runs.checks import check_method
from eagleray.runs.method_checks import check_resume, difference, rehearse
from eagleray.runs.recipe import Recipe

BATCH, IMAGES = 12, 40
BACKBONES = {
    "vit": [],
    "swin": [
        "backbone={name: swin_tiny_patch4_window7_224, options: {img_size: 64, embed_dim: 12, depths: [1, 1], "
        "num_heads: [1, 2], window_size: 4}}"
    ],
    "resnet": [
        "backbone={name: resnet50, options: {layers: [1, 1, 1, 1], channels: [16, 32, 64, 128], base_width: 16}}"
    ],
}


# "vit" is the recipe's own backbone: a ViT, or a CNN of those that take no other.
REFUSED = {("swin", m) for m in CNN_ONLY} | {(b, m) for b in ("swin", "resnet") for m in VIT_ONLY}
KINDS = [(m, b) for m in METHODS for b in BACKBONES if (b, m) not in REFUSED]


def recipe_of(method: str, folder: Path, overrides: list[str] | None = None) -> Recipe:
    (path := folder / f"{method}.yaml").write_text(small_recipe(method))
    text = path.read_text()
    if overrides and "swin" in overrides[0]:
        path.write_text(text.replace("size: 16", "size: 64").replace("size: 8", "size: 32"))
    if overrides:  # another backbone replaces the section, and does not merge with it
        path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("backbone:")))
    return config.load(Recipe, path, ["data.train=none", *(overrides or [])])


def batch_of(recipe: Recipe, step: int = 0) -> Batch:
    g = torch.Generator().manual_seed(step)
    views = [torch.randn(BATCH, 3, v.size, v.size, generator=g) for v in recipe.views for _ in range(v.count)]
    index = torch.randperm(IMAGES, generator=g)[:BATCH]
    return Batch(views, index, torch.arange(BATCH) % 10, (BATCH,), whole_boxes(views))


def build(recipe: Recipe) -> Method:
    method = build_method(recipe)
    method.allocate(IMAGES)
    return method


def test_every_method_is_tested():
    assert sorted(METHODS) == config.parts("eagleray.methods")


@pytest.mark.parametrize(("method", "backbone"), KINDS)
def test_trains_on_every_kind_of_backbone(method: str, backbone: str, tmp_path: Path):
    recipe = recipe_of(method, tmp_path, BACKBONES[backbone])
    m = build(recipe)
    before = {n: p.detach().clone() for n, p in m.named_parameters() if p.requires_grad}
    batches: Iterator[tuple[Progress, Batch]] = ((Progress(s, 4, 2), batch_of(recipe, s)) for s in (2, 3, 4, 5))
    optimizer = build_optimizer(recipe, m)
    for taken in Trainer(m, optimizer, lr=lambda _: 1e-3, weight_decay=lambda _: 0.0).steps(batches):
        assert torch.isfinite(taken.values["loss"])
        assert not taken.values["skipped"]
    still = [n for n, p in m.named_parameters() if n in before and torch.equal(p, before[n])]
    assert not still, "parameters that nothing trains"
    assert encoder_with(m, m.monitored_backbone()).backbone is m.monitored_backbone()


@pytest.mark.parametrize("method", METHODS)
def test_a_method_alone_has_the_loss_of_a_run(method: str, tmp_path: Path):
    recipe = recipe_of(method, tmp_path)
    batch, at = replace(batch_of(recipe), index=torch.arange(BATCH)), Progress(0, 1, 1)
    alone, of_run = build(recipe), build(recipe)
    torch.manual_seed(0)
    loss = alone.loss(batch.views, batch.label)
    torch.manual_seed(0)
    assert torch.equal(loss, of_run(batch, at)["loss"])
    assert loss.requires_grad


PAIRS = [m for m in METHODS if config.part_constant("eagleray.methods", m, "views")[0] == 2]
TAKES_TWO_SIZES = ("barlow_twins", "byol", "densecl", "dino", "moby", "moco", "mocov3", "selfpatch", "selfpatch_moby")
TAKES_TWO_SIZES += ("pixpro", "simclr", "simsiam", "swav", "vicreg")


@pytest.mark.parametrize("method", PAIRS)
def test_views_of_two_sizes_are_trained_on_or_refused(method: str, tmp_path: Path):
    for sizes in ((32, 16), (16, 32)):
        recipe = replace(recipe_of(method, tmp_path), views=tuple(View(size=size) for size in sizes))
        if method in TAKES_TWO_SIZES or (method, sizes) in (("lejepa", (32, 16)), ("pirl", (16, 32))):
            check_method(recipe)
            assert torch.isfinite(build(recipe)(batch_of(recipe), Progress(7, 4, 2))["loss"])
        else:  # they look tokens up in the other view, or one view has to be larger
            with pytest.raises(
                UserError, match=r"^views: [^\n]* (one size|its global views, first|method.patch than 8)$"
            ):
                check_method(recipe)


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_give_the_gradient_of_the_whole(method: str, tmp_path: Path, table: Table):
    recipe = recipe_of(method, tmp_path)
    parts = replace(recipe, optim=replace(recipe.optim, micro_batch=5))
    ours, want = (rehearse(r, (BATCH,), steps=range(5, 6)).gradient for r in (parts, recipe))
    error = difference(ours, want)
    table.add(method, "micro-batches of 5 of 12", error)
    assert error < 1e-5


def test_micro_batches_hold_less_memory(tmp_path: Path):
    """The backbone keeps the activations of one part for the backward pass."""
    recipe = recipe_of("mocov3", tmp_path)

    def kept(size: int | None) -> int:
        m = build(replace(recipe, optim=replace(recipe.optim, micro_batch=size)))
        held: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
            m.base_encoder.backbone.pooled(batch_of(recipe).views[0])
        return sum(held)

    assert kept(2) < kept(None) / 5


@pytest.mark.parametrize("backbone", ["{name: resnet50}", "{name: vit_tiny_patch16_224, norm: batch}"])
def test_micro_batches_are_refused_where_they_are_not_exact(backbone: str, tmp_path: Path):
    with pytest.raises(UserError, match=r"optim.micro_batch=4: the batch norm of .* needs the whole batch"):
        build_method(recipe_of("byol", tmp_path, [f"backbone={backbone}", "optim.micro_batch=4"]))


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_holds_all_there_is(method: str, tmp_path: Path):
    check_resume(method, recipe_of(method, tmp_path), (BATCH,))
