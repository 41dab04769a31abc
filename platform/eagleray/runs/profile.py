"""Profile some steps of a run: a trace for chrome://tracing or Perfetto, and a table of the dearest operations."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from eagleray.base import devices
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.runs import layout
from eagleray.runs.recipe import steps

ROWS = 10  # of the table
ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
TABLE, TRACE = "operations.txt", "trace.json"


def profiled(
    batches: Iterable[tuple[Progress, Batch]], wanted: str, folder: Path, device: torch.device
) -> Iterator[tuple[Progress, Batch]]:
    """Yield the batches, and record what happens to those of the `wanted` steps, such as `10..12`, from when they are
    yielded to when the next is asked for. Steps are counted from 1. Trace and table are written into the run's
    folder."""
    first, last = steps(wanted)
    recorder: profile | None = None
    try:
        for at, batch in batches:
            step = at.step + 1
            if recorder is None and first <= step <= last:
                recorder = profile(activities=[ACTIVITIES[k] for k in sorted({"cpu", device.type} & ACTIVITIES.keys())])
                recorder.start()
            yield at, batch
            if recorder is not None and step == last:
                write(recorder, folder / layout.PROFILE, device)
                recorder = None
    finally:
        if recorder is not None:  # the run has ended before the last wanted step
            write(recorder, folder / layout.PROFILE, device)


def write(recorder: profile, folder: Path, device: torch.device) -> None:
    """End a recording, and write its trace and its table into a folder."""
    devices.synchronize(device)
    recorder.stop()
    folder.mkdir(parents=True, exist_ok=True)
    recorder.export_chrome_trace(str(folder / TRACE))
    key = "self_device_time_total" if devices.is_accelerator(device) else "self_cpu_time_total"
    table = recorder.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=50)
    (folder / TABLE).write_text(table)
