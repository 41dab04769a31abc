"""Forecast a run on the devices of this machine before it begins, and stop one that cannot fit."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.runs import accelerators, layout
from eagleray.runs.build import build_method
from eagleray.runs.forecast import GIB, Data, Target, forecast, refusal
from eagleray.runs.plan import Plan
from eagleray.runs.recipe import Recipe, identity, span
from eagleray.runs.run_store import run_store

SMALL = 0.01  # share of a CPU's memory below which a run's weights and images certainly fit
STATE = 4  # times the weights that a run holds, with gradients and two moments


def local_target(recipe: Recipe) -> Target | None:
    """Return the devices of this machine as a target, or None where the workers are elsewhere or the devices do not say
    how much memory they have."""
    ranks = max(span(recipe.workers)[1], 1)
    device = devices.current()
    if recipe.gpus is False or not devices.is_accelerator(device):
        if recipe.gpus or (recipe.workers and os.environ.get("RAY_ADDRESS")):
            return None  # the workers are on other machines
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return Target("cpu", ranks, None, memory / ranks) if memory else None
    size = devices.memory_size(device)
    if size is None:
        return None
    name = devices.name(device)
    known = accelerators.recognise(name, size / GIB)
    rates = accelerators.stated_rates(known) if known else None
    return Target(name, ranks, rates, size, known)


def data_of(plan: Plan) -> Data:
    """Return what a forecast must know about the opened data of a run."""
    index = plan.index
    return Data(plan.stream.samples_per_epoch, float(sum(b.size or 0 for b in index.shards)) / max(len(index), 1))


def check_fit(plan: Plan, say: Callable[[str], None], *, insist: bool = False) -> None:
    """Print the forecast of a run in one line, and store it in the run's folder for its records and its report.

    Raises UserError when the run cannot fit on this machine's accelerator, unless the user `insist`s. On a CPU that is
    a warning, and a run that is small beside the machine's memory is not traced, which would take longer than it says.
    """
    recipe, target = plan.recipe, local_target(plan.recipe)
    if target is None or (target.is_cpu and _small(plan, target)):
        return
    key = _key(recipe, target)
    stored = read_forecast(recipe.out)
    if stored.get("key") == key:
        say(stored["line"])
        return
    data = data_of(plan)
    result = forecast(recipe, target, data)
    say(result.line())
    if not result.fits and not insist:
        error = refusal(recipe, result, target, data)
        if not target.is_cpu:
            raise UserError(f"{error}; --insist begins the run all the same")
        say(f"warning: {error}")
    note = asdict(result) | {"images_per_s": result.images_per_s, "line": result.line(), "key": key}
    run_store(recipe.out).put(layout.FORECAST, json.dumps(note, indent=1))


def _small(plan: Plan, target: Target) -> bool:
    """Return whether a run's weights, moments and images are far below the memory of a CPU."""
    views = sum(3 * v.size**2 * v.count for v in plan.recipe.views) * plan.recipe.optim.batch
    with torch.device("meta"):
        weights = sum(p.numel() for p in build_method(plan.recipe).parameters())
    return 4 * (views + STATE * weights) < SMALL * target.memory * target.ranks


def _key(recipe: Recipe, target: Target) -> dict[str, Any]:
    """Return what a forecast depends on, as plain values."""
    o = recipe.optim
    said = json.loads(json.dumps(identity(recipe), default=str))
    return {"recipe": said, "device": target.name, "ranks": target.ranks, "precision": recipe.precision,
            "micro_batch": o.micro_batch, "checkpointing": o.checkpointing, "parallel": recipe.parallel}  # fmt: skip


def read_forecast(out: str) -> dict[str, Any]:
    """Return the stored forecast of a run as plain values; empty where there is none."""
    return dict(json.loads(run_store(out).get(layout.FORECAST) or "{}"))


def utilisation(stored: dict[str, Any], images_per_s: float, ranks: int, epoch: float) -> float | None:
    """Return the model FLOP utilisation of a run in an epoch, or None where its device's peak is not known."""
    peak = stored.get("peak_flops")
    phase = next((phase for phase in stored.get("phases", ()) if epoch < phase["until"]), stored)
    return images_per_s * phase["flops_per_image"] / (ranks * peak) if peak else None
