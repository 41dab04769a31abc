"""Build the method, the backbone, the optimiser and the training loop of a recipe, the same in every process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from eagleray.base.errors import UserError
from eagleray.config import register
from eagleray.config.curriculum import PhaseViews
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.view import View
from eagleray.data.batch import Batch
from eagleray.engine import optim
from eagleray.engine.loop import Step, Trainer, patch_parameters
from eagleray.engine.precision import Precision
from eagleray.methods.method import Method
from eagleray.models import masking
from eagleray.models.backbone import Backbone
from eagleray.models.checkpointing import checkpoint_blocks
from eagleray.models.weights import Weights, fill
from eagleray.runs import contract
from eagleray.runs.recipe import Recipe


def build_method(recipe: Recipe, start: Weights | None = None) -> Method:
    """Return the method with fresh weights, the same in every process. `start` replaces the weights of its backbone
    before the method copies them, as for a teacher. Raises UserError."""
    torch.manual_seed(recipe.seed)
    network = build_backbone(recipe)
    if start:
        fill(network, start)
    if recipe.method.name in register.entries("method"):
        return contract.build(recipe.method, network)
    return recipe.method.build(network)  # type: ignore[no-any-return]


def build_backbone(recipe: Recipe) -> Backbone:
    """Return the backbone with fresh weights. Raises UserError."""
    network = Backbone(**recipe.backbone.arguments)
    chosen = recipe.optim.micro_batch
    network.micro_batch = size = None if chosen == "auto" else chosen  # `train` chooses it: runs/auto_micro_batch.py
    if size and network.batch_norm:
        raise UserError(f"optim.micro_batch={size}: the batch norm of {recipe.backbone.name} needs the whole batch")
    if recipe.optim.checkpointing:
        checkpoint_blocks(network.model)
    if any(phase.keep < 1 for phase in recipe.curriculum):
        masking.allow_dropping(network.model)
    return network


def check_method(recipe: Recipe) -> Method:
    """Build the method without memory for its weights, check that the recipe fits it, and return it.

    Raises UserError when it cannot be built, when it works with another number of views, and when its backbone cannot
    take a size that the recipe asks for.
    """
    with torch.device("meta"):
        method = build_method(recipe)
        views, (least, most) = sum(v.count for v in recipe.views), method.views
        if not least <= views <= most:
            count = f"{least}" if least == most else f"{least} to {most}"
            raise UserError(f"views: got {views}, but {recipe.method.name} works with {count}")
        check_dropped_patches(recipe, method)
        o = recipe.optim
        optim.param_groups(
            method,
            decay=o.decay,
            constant=o.constant_lr,
            layer_decay=o.layer_decay,
            undecayed_lr_scale=o.undecayed_lr_scale,
        )
        if o.clip_patch and not patch_parameters(method):
            raise UserError(f"optim.clip_patch={o.clip_patch}: no patch projection is trained")
        backbone = method.export()
        stated = {v.size for v in recipe.views} | {recipe.evaluate.size}
        for size in sorted(stated | {size for phase in recipe.curriculum for size in phase.sizes}):
            try:
                found = backbone(torch.empty(2, recipe.planes, size, size)).pooled.shape[1]
            except Exception as e:
                given = f"backbone.name={recipe.backbone.name}: cannot take {size} pixel images"
                raise UserError(f"{'' if size in stated else 'curriculum: '}{given}: {e}") from None
            if found != backbone.dim:
                raise UserError(
                    f"backbone.name={recipe.backbone.name}: its features have {found} "
                    f"channels, but the model states {backbone.dim}"
                )
        *early, full = recipe.phases
        method.check_views(_empty(full.views, recipe.planes))
        for i, phase in enumerate(early):
            try:
                method.check_views(_empty(phase.views, recipe.planes))
            except UserError as e:
                raise UserError(f"curriculum.{i}.sizes={[v.size for v in phase.views]}: {e}") from None
    return method


def check_dropped_patches(recipe: Recipe, method: Method) -> None:
    """Raises UserError when views are to lose patches that something reads."""
    rate = recipe.backbone.options.get("patch_drop_rate", 0)
    keys = [f"curriculum.{i}.keep={phase.keep:g}" for i, phase in enumerate(recipe.curriculum) if phase.keep < 1]
    if not rate and not keys:
        return
    key = keys[0] if keys else f"backbone.options.patch_drop_rate={rate}"
    if not method.pooled_only:
        raise UserError(f"{key}: {recipe.method.name} reads every patch of a view; expected all of them, 1")
    if recipe.start and recipe.start.anchor:
        raise UserError(f"{key}: start.anchor={recipe.start.anchor:g} compares every patch of a view; leave one out")


def _empty(views: Sequence[View], planes: int) -> list[torch.Tensor]:
    return [torch.empty(2, planes, v.size, v.size) for v in views for _ in range(v.count)]


def build_optimizer(recipe: Recipe, method: Method) -> torch.optim.Optimizer:
    o, lr = recipe.optim, scaled_lr(recipe).value
    return optim.make(
        o.name,
        method,
        decay=o.decay,
        momentum=o.momentum,
        beta2=o.beta2,
        constant=o.constant_lr,
        constant_lr=lr,
        layer_decay=o.layer_decay,
        undecayed_lr_scale=o.undecayed_lr_scale,
    )


def make_trainer(
    recipe: Recipe,
    method: Method,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    wrap: Callable[[Method], nn.Module] = lambda method: method,
) -> Trainer:
    """Return a trainer with the settings of a recipe."""
    o, phases = recipe.optim, recipe.phases
    drops = any(phase.keep < 1 for phase in phases)
    made: Callable[..., Trainer] = partial(PatchDroppingTrainer, phases) if drops else Trainer
    return made(
        method,
        optimizer,
        lr=scaled_lr(recipe),
        weight_decay=o.weight_decay,
        clip=o.clip,
        clip_each=o.clip_each,
        clip_patch=o.clip_patch,
        freeze=recipe.start.freeze if recipe.start else 0.0,
        seed=recipe.seed,
        wrap=wrap,
        precision=precision,
    )


class PatchDroppingTrainer(Trainer):
    """A trainer whose trained backbones keep the share of patches that the phase of the curriculum asks for."""

    def __init__(self, phases: Sequence[PhaseViews], *trained: Any, **settings: Any) -> None:
        super().__init__(*trained, **settings)
        self.phases = phases
        self.models = [m.model for m in self.trunks if any(p.requires_grad for p in m.parameters())]

    def step(self, at: Progress, batch: Batch) -> Step:
        share = next((p.keep for p in self.phases if at.step < p.until * at.steps_per_epoch), 1.0)
        for model in self.models:
            masking.keep_patches(model, share)
        return super().step(at, batch)


def scaled_lr(recipe: Recipe) -> Schedule:
    """Return the learning rate for the recipe's batch. It is proportional to the batch where `optim.lr_images` says
    for which batch the recipe's rate is meant."""
    lr, images = recipe.optim.lr, recipe.optim.lr_images
    return replace(lr, value=lr.value * recipe.optim.batch / images) if images else lr
