"""Profile some steps of a run: a trace for chrome://tracing or Perfetto, and a table of the slowest operations."""

from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from eagleray.base import devices
from eagleray.runs import layout
from eagleray.runs.recipe import steps

ROWS = 10  # rows of the table
ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
TABLE, TRACE = "operations.txt", "trace.json"


class Profiler:
    """Records the `wanted` steps of a run, such as `10..12`, and writes a trace and a table into its folder. Steps are
    counted from 1. Without `wanted` it does nothing."""

    def __init__(self, wanted: str | None, folder: Path, device: torch.device) -> None:
        self.first, self.last = steps(wanted) if wanted else (0, 0)
        self.folder, self.device = folder / layout.PROFILE, device
        self.recorder: profile | None = None

    def __enter__(self) -> Self:
        return self

    def before(self, step: int) -> None:
        """Begin or end the recording if it is due. Called before the batch of a step is requested."""
        if self.recorder is not None and step > self.last:
            self.end()
        if self.recorder is None and self.first <= step <= self.last:
            kinds = sorted({"cpu", self.device.type} & ACTIVITIES.keys())
            self.recorder = profile(activities=[ACTIVITIES[kind] for kind in kinds])
            self.recorder.start()

    def end(self) -> None:
        """Write the recording. It has fewer steps than wanted if the run ends before the last of them."""
        if self.recorder is not None:
            recorder, self.recorder = self.recorder, None
            write(recorder, self.folder, self.device)

    def __exit__(self, *_: object) -> None:
        self.end()


def write(recorder: profile, folder: Path, device: torch.device) -> None:
    """End a recording, and write its trace and its table into a folder."""
    devices.synchronize(device)
    recorder.stop()
    folder.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(folder / TRACE))
    key = "self_device_time_total" if devices.is_accelerator(device) else "self_cpu_time_total"
    table = recorder.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=50)
    (folder / TABLE).write_text(table)
