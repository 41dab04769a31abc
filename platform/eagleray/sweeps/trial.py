"""Run a trial of a sweep: one thread pretrains, and another reports the objective to Ray Tune."""

import contextlib
import gc
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
from eagleray.base.allocator import give_back
from eagleray.base.errors import Outage, Preempted, Superseded, UserError, one_line
from eagleray.cluster import ray_train
from eagleray.config import plugins
from eagleray.engine import world
from eagleray.runs import layout, pretrain
from eagleray.runs.checks import make_plan
from eagleray.runs.command import write_plugins
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.runs.tracking import Tracking
from eagleray.sweeps.label_free import MEASURED, REFERENCES, objective
from eagleray.sweeps.trial_files import finished_summary, free_resources, placements
from eagleray.sweeps.trial_world import TrialWorld

POLL = 0.2  # seconds between two reads of a run's metrics.jsonl
PATIENCE = 120.0  # seconds to wait for a run to save when its trial is stopped


class Trial:
    """The pretraining run of a trial. It starts in a thread of its own when the first result is requested."""

    def __init__(self, name: str, settings: Mapping[str, Any], tracking: Tracking) -> None:
        self.out, self.settings, self.reported = f"{settings['folder']}/{name}", settings, float(settings["after"])
        self.store = run_store(self.out)
        key = f"{tracking.parent}/{name}" if tracking.parent else None
        self.tracking = replace(tracking, name=f"{settings['sweep']}-{name}", key=key)
        self.thread: threading.Thread | None = None
        self.steps, self.summary, self.failure = 0, dict[str, Any](), ""
        self.away = ""  # error of a store or server whose outage ended the run, which can continue later
        self.leaves: Preempted | Superseded | None = None  # the error to raise if another process continues the run
        try:
            plugins.install(settings["plugins"])
            tree = settings["recipe"] | {"out": self.out}
            self.recipe = config.check(Recipe, tree, f"trial {name}")
        except UserError as e:  # a plug-in may need a package that this machine lacks
            self.failure = line(e)
        self.history = ObjectiveHistory(settings["objective"])
        self.began = time.monotonic()

    @property
    def folder(self) -> Path:
        """Return the folder on this machine with the run's metrics: the one that the run writes or, if the run has
        several workers, which may be on other machines, a copy."""
        return self.store.view if self.recipe.ranks[1] > 1 else self.store.work

    def begin(self) -> None:
        """Write the recipe into the trial's folder and start the run's thread, unless the trial has failed for good."""
        free_resources(self.out)
        if why := self.store.get(layout.FAILED):  # the trial's process may have died too often
            self.failure = why
            return
        for left in (layout.STOP, layout.FAILURE):
            self.store.delete(left)
        self.store.put(layout.RECIPE, config.dump(self.recipe))
        write_plugins(self.out, self.recipe.plugins)
        self.summary, self.failure, self.away = {}, "", ""
        self.thread = threading.Thread(target=self._work, name="pretrain", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        """Pretrain, and keep the summary or the error's text, as the error itself would keep the network in memory."""
        try:
            self.steps = make_plan(self.recipe).steps
            if summary := finished_summary(self.out, self.steps):  # it may have ended on another machine
                self.store.fetch(work=self.folder == self.store.work)
            self.summary = summary or self._pretrain() or {}
        except (Preempted, Superseded) as e:
            self.leaves = e
        except Outage as e:
            self.away = line(e)
        except Exception as e:
            self.failure = line(e)

    def _pretrain(self) -> dict[str, Any] | None:
        """Pretrain in this process or, with several workers, by Ray Train. Returns the summary; None if stopped."""
        import ray

        how = {"tracking": self.tracking, "command": self.settings["command"]}
        if self.recipe.ranks[1] > 1:
            with self.store.following():
                return ray_train.fit(ray, self.recipe, **how, callbacks=[placements(self.out)])
        torch.set_num_threads(self.settings["threads"])
        if not ray.is_initialized():
            return pretrain.pretrain(self.recipe, world.local(self.recipe.gpus), **how)
        with contextlib.closing(TrialWorld(self.recipe, self.tracking.user)) as here:
            return pretrain.pretrain(self.recipe, here, **how)

    def next(self) -> dict[str, Any]:
        """Wait for the next result for Tune, and return it: a new value of the objective, or the end of the trial.
        Raises Preempted and Superseded when another process has to continue."""
        if self.thread is None and not self.failure:
            self.begin()
        if self.thread is None:
            return self.last()
        while True:
            alive = self.thread.is_alive()
            for record in self.records():
                percent = 100 * record["step"] / self.steps
                if self.reported < percent < 100:
                    self.reported = percent
                    return self.result(record["step"], percent, objective(record, self.settings["objective"]))
            if not alive:
                return self.last()
            time.sleep(POLL)

    def records(self) -> list[dict[str, Any]]:
        """Return the lines that metrics.jsonl has so far, without those that lack the objective."""
        return self.history.lines(self.folder / layout.METRICS) if self.steps else []

    def result(self, step: int, percent: float, value: float) -> dict[str, Any]:
        """Return a value of the objective as a result for Tune."""
        numbers = self.history.latest | {k: self.summary[k] for k in REFERENCES if k in self.summary}
        result = {"step": step, "steps": self.steps, "percent": percent, "value": float(value), "numbers": numbers}
        return result | {"seconds": round(time.monotonic() - self.began, 1)}

    def last(self) -> dict[str, Any]:
        """Return the result that ends the trial: with the final value, with the error of a store that does not answer,
        or with neither if the trial has failed or was asked to stop. Raises what `next` raises."""
        key = self.settings["objective"]
        if self.leaves:
            raise self.leaves
        if self.away:
            return {"done": True, "percent": self.reported, "away": self.away}
        if not self.failure and not self.summary:  # the run was asked to stop
            return {"done": True, "percent": self.reported}
        values = [] if self.failure else [objective(r, key) for r in self.records()]
        value = self.summary.get(key, values[-1] if values else None)
        if self.failure or value is None:  # after an error Tune would restart the trial, which would fail again
            why = self.failure or f"objective.key={key}: the run never reported this metric"
            self.store.put(layout.FAILED, why)
            return {"done": True, "percent": self.reported}
        return self.result(self.steps, 100.0, value) | {"done": True}

    def end(self) -> None:
        """Ask the run to save and stop, wait up to PATIENCE seconds for its end, and free resources and memory."""
        if self.thread is None:
            return
        if self.thread.is_alive():
            self.store.put(layout.STOP, "")
            self.thread.join(PATIENCE)
        self.thread = None
        free_resources(self.out)
        free_memory()


class ObjectiveHistory:
    """The lines of a growing metrics.jsonl that have the metric `key`. Each line is parsed once."""

    def __init__(self, key: str) -> None:
        self.key, self.inode = key, 0
        self.tail: files.Tail | None = None
        self.records: list[dict[str, Any]] = []
        self.latest: dict[str, float] = {}  # newest value of each label-free measure and kNN accuracy

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """Return the lines that have the metric. A file that a restarted run has replaced is read anew."""
        if not path.exists():
            return []
        stat = path.stat()
        if self.tail is None or stat.st_ino != self.inode or stat.st_size < self.tail.offset:
            self.tail, self.inode, self.records = files.Tail(path, whole=True), stat.st_ino, []
        for record in files.parse_lines(self.tail.lines()):
            self.records += [record] * math.isfinite(objective(record, self.key))
            self.latest |= {k: record[k] for k in (*MEASURED, *REFERENCES) if k in record}
        return self.records


def free_memory() -> None:
    """Free the memory of a run that has ended. Network, hooks and optimiser refer to each other, so only the garbage
    collector frees them."""
    gc.collect()
    give_back()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def line(e: Exception) -> str:
    """Return an error as one line for the table of trials. The trial's train.log has the traceback."""
    return one_line(e) if isinstance(e, UserError | Outage) else f"{type(e).__name__}: {one_line(e)}"
