"""Run a trial of a sweep: one thread pretrains, another reports its metrics to Ray Tune."""

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagleray import config
from eagleray.base import files
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.base.files import read_lines
from eagleray.cluster import ray_train
from eagleray.config import plugins
from eagleray.engine import checkpoint, world
from eagleray.runs import layout, pretrain
from eagleray.runs import recipe as recipes
from eagleray.runs.environment import write_plugins
from eagleray.runs.plan import make_plan
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_dir import finished
from eagleray.runs.tracking import Tracking
from eagleray.sweeps.sweep import put

POLL = 0.2  # seconds between two reads of a run's metrics
PATIENCE = 120.0  # seconds that a run gets to save when its trial is stopped


def trial_dir(folder: Path, name: str) -> Path:
    """Return the folder of a trial's run."""
    return folder / "trials" / name


class Trial:
    """The pretraining run of a trial. It starts in its own thread when the first result is requested."""

    def __init__(self, name: str, settings: Mapping[str, Any], tracking: Tracking) -> None:
        self.folder = Path(settings["folder"])
        self.out, self.settings, self.reported = trial_dir(self.folder, name), settings, float(settings["after"])
        tree = put(settings["recipe"], settings["values"]) | {"out": str(self.out)}
        self.tracking = replace(tracking, name=f"{self.folder.name}-{name}")
        self.thread: threading.Thread | None = None
        self.steps, self.outcome = 0, dict[str, Any]()
        try:
            plugins.install(settings["plugins"])
            self.recipe = config.check(Recipe, tree, f"trial {name}")
        except UserError as e:  # such as of a plug-in that imports what this machine has not
            self.outcome["error"] = e
        self.began = time.monotonic()

    def begin(self) -> None:
        """Write the recipe into the trial's folder, and start the run's thread."""
        self.out.mkdir(parents=True, exist_ok=True)
        free_resources(self.out)
        for left in (layout.STOP, layout.FAILURE, layout.FAILED):
            (self.out / left).unlink(missing_ok=True)
        files.write_atomic(self.out / layout.RECIPE, config.dump(self.recipe))
        write_plugins(str(self.out), self.recipe.plugins)
        self.outcome = {}
        self.thread = threading.Thread(target=self._work, name="pretrain", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        """Pretrain, and store the summary or the error."""
        try:
            self.steps = make_plan(self.recipe).steps
            if done := finished(self.out, self.steps):
                self.outcome["summary"] = done
            elif self.recipe.ranks[1] > 1:
                import ray

                callbacks = [placements(self.out)]
                self.outcome["summary"] = ray_train.fit(ray, self.recipe, tracking=self.tracking, callbacks=callbacks)
            else:
                torch.set_num_threads(self.settings["threads"])
                self.outcome["summary"] = pretrain.pretrain(
                    self.recipe, world.local(self.recipe.gpus), tracking=self.tracking, command=time.time()
                )
        except Exception as e:
            self.outcome["error"] = e

    def next(self) -> dict[str, Any]:
        """Wait for the next result for Tune, and return it: a new value of the objective, or the end of the trial."""
        if self.thread is None and "error" in self.outcome:
            self.out.mkdir(parents=True, exist_ok=True)
            return self.last()
        if self.thread is None:
            self.begin()
        assert self.thread is not None
        while True:
            alive = self.thread.is_alive()
            for record in self.records():
                percent = 100 * record["step"] / self.steps
                if self.reported < percent < 100:
                    pause = self.settings["pause"]
                    if pause and percent // pause > self.reported // pause:
                        self.end()  # not ahead of an exchange of weights
                    self.reported = percent
                    return self.result(record["step"], percent, record[self.settings["objective"]])
            if not alive:
                return self.last()
            time.sleep(POLL)

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far that hold the objective."""
        path, key = self.out / layout.METRICS, self.settings["objective"]
        return [r for r in read_lines(path) if math.isfinite(r.get(key, math.nan))] if self.steps else []

    def result(self, step: int, percent: float, value: float) -> dict[str, Any]:
        """Return a value of the objective in the form that Tune expects."""
        result = {"step": step, "steps": self.steps, "percent": percent, "value": float(value)}
        return result | {"seconds": round(time.monotonic() - self.began, 1)}

    def last(self) -> dict[str, Any]:
        """Return the result that ends the trial: its final value, its failure, or that it was asked to stop."""
        if "error" in self.outcome:
            return self.fail(self.outcome["error"])
        summary, key = self.outcome.get("summary"), self.settings["objective"]
        if summary is None:  # asked to stop
            return {"done": True, "percent": self.reported}
        values = [r[key] for r in self.records()]
        value = summary.get(key, values[-1] if values else None)
        if value is None:
            return self.fail(UserError(f"objective.key={key}: the run never reported this metric"))
        return self.result(self.steps, 100.0, value) | {"done": True}

    def fail(self, error: Exception) -> dict[str, Any]:
        """Write the error into the trial's folder, and return a result that ends the trial. Tune shall not restart
        it, as it would fail again."""
        (self.out / layout.FAILED).write_text(line(error))
        return {"done": True, "percent": self.reported}

    def end(self) -> None:
        """Ask the run to save and stop, then wait until its workers have ended and their resources are free."""
        if self.thread is None:
            return
        if self.thread.is_alive():
            (self.out / layout.STOP).touch()
            self.thread.join(PATIENCE)
        self.thread = None
        free_resources(self.out)

    def adopt(self, donor: str) -> None:
        """Continue from the newest checkpoint of the trial `donor`, with this trial's own values."""
        state = checkpoint.newest(trial_dir(self.folder, donor) / "checkpoints")
        if state is None:
            return
        state |= {"digest": recipes.digest(self.recipe), "recipe": config.dump(self.recipe)}
        for group in state["optimizer"]["param_groups"]:
            if "momentum" in group:
                group["momentum"] = self.recipe.optim.momentum
        checkpoint.save(self.out / "checkpoints", state["step"], state, keep=self.recipe.checkpoint.keep)
        line = {"step": state["step"], "from": donor, "values": self.settings["values"]}
        files.append_lines(self.out / layout.LINEAGE, [line])


def line(e: Exception) -> str:
    """Return an error as one line for the table of trials; the trial's train.log has the traceback."""
    return one_line(e) if isinstance(e, UserError | Outage) else f"{type(e).__name__}: {one_line(e)}"


def placements(out: Path) -> Any:
    """Return a callback that writes down which CPUs and GPUs Ray reserved for a run's workers, so that they can be
    freed if the run's process dies."""
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    class Placements(WorkerGroupCallback):  # type: ignore[misc]
        def after_worker_group_start(self, worker_group: Any) -> None:
            held = worker_group.get_worker_group_state().placement_group_handle.placement_group
            (out / layout.PLACEMENT).write_text(held.id.hex())

    return Placements()


def free_resources(out: Path) -> None:
    """Free the CPUs and GPUs that Ray still reserves for the workers of a trial whose process died."""
    note = out / layout.PLACEMENT
    if note.exists():
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(note.read_text()))))
        note.unlink(missing_ok=True)
