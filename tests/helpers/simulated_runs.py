"""Whole runs of small recipes on the simulated device."""

from pathlib import Path
from typing import Any

import pytest
from helpers.recipes import small_recipe
from helpers.simulated_device import DEVICE, simulated

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.engine.loop import Step, Trainer
from eagleray.engine.world import World
from eagleray.runs import pretrain, recipe
from eagleray.runs.recipe import Recipe
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import Tracking

EVERY, SAVE = 4, 5  # steps between records and looks of the monitor, and between checkpoints: they wait


class Killed(BaseException):
    """Ends a run as a signal would, in the middle of its steps."""


def small_run(method: str, shards: Path, out: Path, *more: str) -> Recipe:
    """Return the resolved recipe of a method, ten steps an epoch, that evaluates and logs rarely."""
    out.mkdir(parents=True, exist_ok=True)
    file = out.parent / f"{method}.yaml"
    file.write_text(small_recipe(method))
    data = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={out}"]
    rare = [f"log_steps={EVERY}", f"monitor.every={EVERY}", f"checkpoint.steps={SAVE}"]
    rare += ["evaluate.limit=32", "evaluate.probe_epochs=1"]
    return resolve_paths(recipe.load(str(file), [*data, *rare, *more]))


def run_on_device(
    r: Recipe, monkeypatch: pytest.MonkeyPatch, *, kill_at: int = 0, export: bool = False
) -> tuple[dict[str, Any] | None, dict[int, list[str]]]:
    """Pretrain on the simulated device. Return the summary and the waits of each step, with what follows it
    until the next one: the monitor, records, checkpoints, and the next batch.

    `kill_at` is a step that does not begin. Without `export` the backbone is not exported, which would take a process
    of its own."""
    begun: dict[int, int] = {}  # the number of waits before each step
    take = Trainer.step

    def noted(self: Trainer, at: Progress, batch: Batch) -> Step:
        if at.step + 1 == kill_at:
            raise Killed
        begun[at.step + 1] = len(waits)
        return take(self, at, batch)

    with monkeypatch.context() as patched, simulated() as waits:
        patched.setattr(Trainer, "step", noted)
        if not export:
            patched.setattr(pretrain, "write_export", lambda *_: None)
        try:
            summary = pretrain.pretrain(r, World(DEVICE), tracking=Tracking("none"))
        except Killed:
            summary = None
        return summary, {step: waits[n : begun.get(step + 1)] for step, n in begun.items()}


def quiet_waits(waits_of: dict[int, list[str]]) -> dict[int, list[str]]:
    """Return the waits of the steps that neither log nor save or evaluate, after the first two of the run."""
    first, last = min(waits_of), max(waits_of)
    quiet = [n for n in waits_of if first + 1 < n < last and n % EVERY and n % SAVE]
    assert quiet
    return {n: waits_of[n] for n in quiet if waits_of[n]}
