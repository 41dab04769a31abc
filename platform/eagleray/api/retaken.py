"""Take steps again on several ranks, and say what may differ from when they were taken first."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from eagleray.base import devices
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.runs import layout
from eagleray.runs.origin import DIGESTS
from eagleray.runs.replay import Taken, Task, take
from eagleray.runs.step_record import StepRecord, start_of

ARITHMETIC = ("ranks", "device", "threads", "torch", "keys")  # what the last digits depend on, in starts.jsonl


def has_accelerators(ranks: int) -> bool:
    """Return whether so many ranks find an accelerator each, on this machine or perhaps on the cluster of
    RAY_ADDRESS."""
    return len(devices.names()) >= ranks or (ranks > 1 and "RAY_ADDRESS" in os.environ)


def on_ranks(task: Task, ranks: int) -> Taken:
    """Take steps again on as many ranks as the run had. Raises UserError and Outage."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"step {task.step}: was taken on {ranks} ranks, and a replay needs the package ray for them")
    from eagleray.cluster.ray_ranks import ray_ranks

    return ray_ranks(take, task, workers=ranks, gpus=task.gpus, note=say)


def inexact(record: StepRecord, taken: Taken) -> Iterator[str]:
    """Yield the reasons why equal bits cannot be expected."""
    start, about = record.start, taken.about
    if "device" not in start:
        yield "the run has not recorded its device and threads"
        return
    for name in ("device", "torch"):
        if start[name] != about[name]:
            yield f"{name}: {start[name]} there and {about[name]} here"
    if not start["device"].startswith("cpu"):
        keys = start.get("keys", {})
        if not keys.get("deterministic"):
            yield "an accelerator adds in an order that changes, without deterministic=true"
        if keys.get("optim.micro_batch") == "auto":
            yield "optim.micro_batch=auto may choose another size"
    used = {id(s): s for s in (start_of(record.starts, n) for n in range(taken.begin + 1, record.step + 1))}
    if any(s.get(name) != start.get(name) for s in used.values() for name in ARITHMETIC):
        yield "not all steps since then were taken on the same ranks, device and threads"


def changed(record: StepRecord, taken: Taken, folder: Path) -> Iterator[str]:
    """Yield what is not as it was when the run took the step."""
    for name in DIGESTS:
        if record.start.get(name, taken.about[name]) != taken.about[name]:
            yield f"{name}: {record.start[name]} there and {taken.about[name]} here"
    known = {(b.get("shard"), b.get("key"), b.get("offset")) for b in read_lines(folder / layout.QUARANTINE)}
    new = [b for b in taken.bad if (b.shard, b.key, b.offset) not in known]
    if new:
        yield f"data: {len(new)} image(s) are broken that were not, the first is {new[0].key}: {new[0].reason}"
    if record.skipped not in (None, taken.keys):
        yield f"data: {layout.SKIPPED} lists other images for this step"
