"""The memory and the exchange of a training step whose weights FSDP divides among ranks (Zhao et al. 2023).

arXiv:2304.11277. What a rank holds beside its share follows engine/sharded.py: weights outside of blocks are gathered
for the whole step, those of blocks two at a time, one that computes and one that is fetched. Gradients are whole as
long.
"""

from dataclasses import replace

import torch

from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.models.ema import momentum_copies
from eagleray.models.stages import blocks
from eagleray.runs.build import build_method
from eagleray.runs.plan import keys_of_whole_weights
from eagleray.runs.recipe import Recipe
from eagleray.runs.step_trace import GRADIENTS, MOMENTS, TEACHER, WEIGHTS, StepTrace

GATHERED = "gathered"  # weights and gradients that are whole for a while
AT_ONCE = 2  # blocks that are gathered


def divisible(recipe: Recipe) -> bool:
    """Return whether `parallel=fsdp` would be another way to train this recipe."""
    return recipe.parallel == "ddp" and not keys_of_whole_weights(recipe) and _meta_method(recipe).shardable


def divided(recipe: Recipe, trace: StepTrace, ranks: int) -> StepTrace:
    """Return the trace of a step with whole weights on every rank as it is where each rank has a share of them.

    Activations and work are taken to be the same. Weights are gathered for the forward and the backward pass and their
    gradients divided, which is one and a half times the exchange of a sum; a teacher's are gathered once.
    """
    if ranks == 1:
        return trace
    method = _meta_method(recipe)
    parts = (WEIGHTS, TEACHER, GRADIENTS, MOMENTS)
    memory = {kind: -(-n // ranks) if kind in parts else n for kind, n in trace.memory.items()}
    teacher = sum(p.nbytes for copy, _ in momentum_copies(method) for p in copy.parameters())
    return replace(
        trace, memory=memory | {GATHERED: gathered(method)}, gradients=round(1.5 * trace.gradients + 0.5 * teacher)
    )


def gathered(method: Method) -> int:
    """Return the bytes of weights and gradients that are whole at once on every rank."""
    each = [block for m in method.modules() if isinstance(m, Backbone) for block in blocks(m.model)]
    sizes = [(sum(p.nbytes * (1 + p.requires_grad) for p in block.parameters())) for block in each]
    inside = {id(p) for block in each for p in block.parameters()}
    outside = sum(p.nbytes * (1 + p.requires_grad) for p in method.parameters() if id(p) not in inside)
    return outside + sum(sorted(sizes)[-AT_ONCE:])


def _meta_method(recipe: Recipe) -> Method:
    with torch.device("meta"):
        return build_method(recipe)
