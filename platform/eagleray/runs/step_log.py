"""Collect what a line of metrics.jsonl reports of the steps since the last line: values, waiting time, bad samples."""

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagleray.base import devices, dist
from eagleray.base.errors import PluginError, UserError
from eagleray.config.schedule import Progress
from eagleray.data.loader import Loader
from eagleray.data.quarantine import Quarantine
from eagleray.engine.loop import Step
from eagleray.engine.world import World
from eagleray.runs import layout, metrics
from eagleray.runs.health import Health, Spikes
from eagleray.runs.monitor import Monitor
from eagleray.runs.plan import Plan
from eagleray.runs.run_dir import RunDir
from eagleray.runs.run_store import run_store

OF_STEPS = (metrics.LOSS, metrics.GRAD_NORM)  # the values in steps.jsonl
SKIPS = 3  # number of steps in a row without a finite gradient after which the run ends


@dataclass
class Clock:
    """The times in seconds that a checkpoint holds."""

    began: float  # time.monotonic() at which the run would have begun if no time had been lost
    useful: float  # seconds in steps that count

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


@dataclass(frozen=True)
class StepTable:
    """The values of S steps, such as the loss, each averaged over the step's images on all ranks."""

    names: list[str]
    rows: Tensor  # (S, names), float32, on the host

    @classmethod
    def of(cls, values: Sequence[Mapping[str, Tensor]], images: Sequence[int]) -> "StepTable":
        """Return the table from this rank's `values` of S steps. `images` is the number of images of each rank in a
        step. The host waits for the device. Called by all ranks together."""
        names = list(values[0])
        if different := next((v.keys() ^ names for v in values if v.keys() != values[0].keys()), None):
            raise PluginError(f"method.name: only some steps return {', '.join(sorted(different))}; return it in each")
        table = torch.stack([torch.stack([v[n].float() for n in names]) for v in values])
        return cls(names, dist.total(table * (images[dist.rank()] / sum(images))).cpu())

    @property
    def skipped(self) -> Tensor:
        """Return which of the steps (S,) were skipped, as their gradient was not finite."""
        return self.column("skipped") >= 0.5

    def column(self, name: str) -> Tensor:
        """Return the value `name` of each step (S,)."""
        return self.rows[:, self.names.index(name)]

    def means(self) -> dict[str, float]:
        """Return the means over the steps that were not skipped, or over all of them if every step was."""
        rows = self.rows if self.skipped.all() else self.rows[~self.skipped]
        means = dict(zip(self.names, rows.mean(0).tolist(), strict=True))
        del means["skipped"]
        return means

    def lines(self) -> list[dict[str, float]]:
        """Return the loss and the gradient norm of each step."""
        columns = [self.column(name).tolist() for name in OF_STEPS]
        return [dict(zip(OF_STEPS, values, strict=True)) for values in zip(*columns, strict=True)]


class OpenLine:
    """Holds the state on which the next lines of metrics.jsonl and health.jsonl depend, over all ranks.
    It is in checkpoints, so that a kill and a restart before these lines do not change them."""

    def __init__(self, layers: Sequence[str] = ()) -> None:
        """`layers` are the names of the layers whose gradients are watched."""
        self.table = StepTable([], torch.empty(0, 0))  # the steps since the last line
        self.skips = 0  # number of latest steps in a row without a finite gradient
        self.spikes = Spikes(layers)
        self.record: dict[str, Any] = {}  # a line that waits for the scores of the evaluation at its step

    def add(self, table: StepTable) -> None:
        """Add the values of further steps. A run that was continued with another precision or version may record other
        values in them: the line then has those that all its steps have."""
        names = [name for name in table.names if name in self.table.names or not len(self.table.rows)]
        tables = [self.table, table] if len(self.table.rows) else [table]
        self.table = StepTable(names, torch.cat([torch.stack([t.column(n) for n in names], 1) for t in tables]))

    def close(self) -> StepTable:
        """Return the values of the line's steps, and begin another line."""
        table, self.table = self.table, StepTable([], torch.empty(0, 0))
        return table

    def state_dict(self) -> dict[str, Any]:
        table = {"names": self.table.names, "rows": self.table.rows, "skips": self.skips}
        return table | {"spikes": self.spikes.state_dict(), "record": self.record}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table, self.skips = StepTable(list(state["names"]), state["rows"]), int(state["skips"])
        self.spikes.load_state_dict(state["spikes"])
        self.record = dict(state["record"])


class StepLog:
    """Collects the values of steps on the device, which are read only when a line is written or a checkpoint saved."""

    def __init__(
        self,
        p: Plan,
        world: World,
        folder: RunDir,
        quarantine: Quarantine,
        monitor: Monitor,
        clock: Clock,
        line: OpenLine,
        loader: Loader,
    ) -> None:
        """Called by all ranks together."""
        self.p, self.world, self.folder, self.quarantine, self.monitor = p, world, folder, quarantine, monitor
        self.line, self.loader = line, loader
        self.health = Health(line.spikes, p.lr.value, p.frozen_steps)
        for record in folder.records():
            self.health.look(record)  # a finding from before a restart is not reported again
        self.forecast = dist.from_rank_zero(partial(read_forecast, folder.out))
        self.values: list[dict[str, Tensor]] = []
        self.indices: deque[Tensor] = deque(maxlen=p.recipe.log_steps)
        self.taken = 0  # steps since the last line that this process has taken
        self.waited, self.since = loader.waited, time.perf_counter()  # values at the last line: seconds waited, clock
        self.clock, self.mark = clock, time.perf_counter()  # mark: time at the end of the last step

    def add(self, taken: Step) -> None:
        """Add the values and the duration of a step."""
        self.clock.useful += time.perf_counter() - self.mark
        self.values.append(taken.values)
        self.indices.append(taken.batch.index)
        self.taken += 1
        self.monitor.watch(taken)

    def end_step(self) -> None:
        """Begin to measure the time of the next step. Called when all that follows a step is done."""
        self.mark = time.perf_counter()

    def settle(self, step: int) -> None:
        """Write the lines of all steps so far, before a checkpoint of this step is saved. Called by all ranks together.
        Raises UserError when too many steps in a row had no finite gradient."""
        self._check(step, self._write_steps(step))

    def _write_steps(self, step: int) -> list[float]:
        """Write a line for each step that has none yet, and return for each of them 1 if it failed, else 0. The host
        waits for the device. A step fails if it is skipped with a loss scale below 1, or without one."""
        if not self.values:
            return []
        table = StepTable.of(self.values, self.loader.rows)
        first = step + 1 - len(self.values)
        self.folder.log_steps([{"step": first + i, **line} for i, line in enumerate(table.lines())])
        self.line.add(table)
        self.values = []
        failed = table.skipped.float()
        if metrics.LOSS_SCALE in table.names:
            # With a larger loss scale the gradient may only have overflowed float16, and the scale is then lowered.
            failed = failed * (table.column(metrics.LOSS_SCALE) < 1)
        return failed.tolist()  # type: ignore[no-any-return]

    def flush(self, at: Progress, lr: float) -> dict[str, Any]:
        """Return a line of metrics.jsonl: means over all ranks and over the steps since the last line."""
        failed = self._write_steps(at.step + 1)
        table, taken = self.line.close(), self.taken
        seconds = time.perf_counter() - self.since
        record = {"step": at.step + 1, "epoch": round((at.step + 1) / at.steps_per_epoch, 4), "lr": lr}
        record |= table.means()
        record[metrics.IMAGES_PER_S] = round(taken * self.p.stream.batch / seconds, 2)
        record |= self._of_device(record[metrics.IMAGES_PER_S], at)
        record[metrics.DATA_WAIT] = round((self.loader.waited - self.waited) / seconds, 4)
        record[metrics.BAD_SAMPLES] = len(self.quarantine)
        record[metrics.SKIPPED_STEPS] = int(table.skipped.sum())
        if at.step + 1 == self.p.steps:
            self.folder.trained(at.step + 1)
        record |= self.folder.goodput(self.clock.useful)
        seen, norms = self.monitor.flush()
        record |= seen
        found = self.health.gradients(at.step + 2 - len(norms), norms) + self.health.look(record)
        self.folder.note_findings(found)
        for finding in found if self.world.rank == 0 else ():
            self.world.show(asdict(finding), self.p.steps)
        self._check(at.step + 1, failed)
        self.taken, self.waited, self.since = 0, self.loader.waited, time.perf_counter()
        return record

    def _of_device(self, images_per_s: float, at: Progress) -> dict[str, float]:
        """Return the model FLOP utilisation, if the device's peak is known, and an accelerator's peak memory in GiB."""
        found = {metrics.MFU: utilisation(self.forecast, images_per_s, self.world.size, at.epoch)}
        if devices.is_accelerator(self.world.device):
            found[metrics.MEMORY_PEAK] = devices.memory_peak(self.world.device)
        return {key: float(f"{value:.4g}") for key, value in found.items() if value is not None}

    def _check(self, step: int, skipped: list[float]) -> None:
        """Write the images of failed steps to skipped.jsonl. `skipped` is what `_write_steps` returned for the last
        steps up to `step`. Raises UserError when SKIPS steps in a row have failed."""
        first = step - len(skipped)
        for i, skip in enumerate(skipped):
            self.line.skips = self.line.skips + 1 if skip > 0.5 else 0
            if skip > 0.5:
                keys = [k for part in dist.gather_objects(self._keys(self.indices[i - len(skipped)])) for k in part]
                self.folder.note_skip(first + i + 1, keys)
            if self.line.skips == SKIPS:
                raise UserError(
                    f"step {first + i + 1}: no finite gradient in {SKIPS} steps in a row; a lower optim.lr.value or an "
                    f"optim.clip may help; {self.folder.path / layout.SKIPPED} lists the images"
                )

    def _keys(self, index: Tensor) -> list[str]:
        """Return the shard and key of images, by their position in the data."""
        return [self.p.index.key(i) for i in index.tolist()]


def read_forecast(out: str) -> dict[str, Any]:
    """Return the stored forecast of a run as plain values; empty where there is none."""
    return dict(json.loads(run_store(out).get(layout.FORECAST) or "{}"))


def utilisation(stored: dict[str, Any], images_per_s: float, ranks: int, epoch: float) -> float | None:
    """Return the model FLOP utilisation of a run in an epoch, or None where its device's peak is not known."""
    peak = stored.get("peak_flops")
    phase = next((phase for phase in stored.get("phases", ()) if epoch < phase["until"]), stored)
    return images_per_s * phase["flops_per_image"] / (ranks * peak) if peak else None
