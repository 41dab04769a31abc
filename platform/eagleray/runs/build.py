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
from eagleray.data.batch import Batch
from eagleray.engine import optim
from eagleray.engine.loop import Step, Trainer
from eagleray.engine.precision import Precision
from eagleray.methods.method import Method
from eagleray.models import tokens
from eagleray.models.backbone import Backbone
from eagleray.models.checkpointing import checkpoint_blocks
from eagleray.runs import contract
from eagleray.runs.recipe import Recipe


def build_method(recipe: Recipe, fill: Callable[[Backbone], object] | None = None) -> Method:
    """Return a recipe's method with random weights, the same in every process. `fill` replaces the weights of the
    backbone before the method copies them, such as for a teacher. Raises UserError when it cannot be built."""
    torch.manual_seed(recipe.seed)
    network = build_backbone(recipe)
    if fill:
        fill(network)
    if recipe.backbone.lora:
        from eagleray.models.lora import adapt  # imported late, as most runs train all weights

        adapt(network, recipe.backbone.lora)
    if recipe.method.name in register.entries("method"):
        return contract.build(recipe.method, network)
    return recipe.method.build(network)  # type: ignore[no-any-return]


def build_backbone(recipe: Recipe) -> Backbone:
    """Return the backbone with random weights. Raises UserError when it cannot be built, or its batch norm forbids the
    recipe's micro-batches."""
    network = Backbone(**recipe.backbone.arguments)
    chosen = recipe.optim.micro_batch
    network.micro_batch = size = None if chosen == "auto" else chosen  # `train` chooses the size for auto later
    if size and network.batch_norm:
        raise UserError(f"optim.micro_batch={size}: the batch norm of {recipe.backbone.name} needs the whole batch")
    if recipe.optim.checkpointing:
        checkpoint_blocks(network.model)
    if any(phase.keep < 1 for phase in recipe.curriculum):
        tokens.allow_dropping(network.model)
    return network


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
    """Return a trainer with the settings of a recipe. `wrap` returns the module that a step calls, such as DDP."""
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
            tokens.keep_patches(model, share)
        return super().step(at, batch)


def scaled_lr(recipe: Recipe) -> Schedule:
    """Return the schedule of the learning rate. If `optim.lr_images` states the batch for which `optim.lr` is meant,
    the rate is scaled in proportion to the recipe's batch."""
    lr, images = recipe.optim.lr, recipe.optim.lr_images
    return replace(lr, value=lr.value * recipe.optim.batch / images) if images else lr
