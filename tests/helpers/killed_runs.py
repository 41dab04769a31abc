"""A run whose process is killed at random moments, and what has to be equal to that of a run that nobody killed."""

import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from helpers.pictures import jpeg
from helpers.recipes import SMALL
from helpers.runs import start

from eagleray.base.files import read_lines
from eagleray.runs import layout
from eagleray.runs import metrics as m
from eagleray.runs.bucket_files import RunCopy
from eagleray.runs.run_store import run_store
from eagleray.runs.summary import read_summary
from eagleray.storage.store import is_remote

HISTORIES = (layout.STEPS, layout.METRICS, layout.SKIPPED, layout.HEALTH, layout.QUARANTINE)
# The numbers of metrics.jsonl and summary.json that tell of the clock, and of the kills.
OF_TIME = {m.IMAGES_PER_S, m.DATA_WAIT, m.MFU, m.GOODPUT, m.RESTARTS, m.STEPS_REPEATED, m.SECONDS_LOST, m.WALL_SECONDS}
# Lines, checkpoints, measurements and evaluations at steps that seldom meet.
KEYS = ("log_steps=7", "checkpoint.steps=5", "checkpoint.keep=2", "monitor.every=9", "evaluate.every=2")
KEYS += ("evaluate.probe_epochs=1", "evaluate.limit=48", "data.bad_limit=0.2", "optim.epochs=40")
BROKEN = 8  # of the images of `write_data`
# A method that has what histories tell of: steps that are skipped, two of them in a row, and spikes.
UNEVEN = """
import math

from eagleray import register
from eagleray.methods.mocov3 import MoCoV3
from eagleray.runs import lease

lease.DEAD = 2.0  # seconds that the next command waits for one that was killed


@register.method("uneven")
class Uneven(MoCoV3):
    def forward(self, batch, at):
        out = super().forward(batch, at)
        factor = math.nan if at.step % 19 in (5, 6) else 1e6 if at.step % 45 in (40, 41, 42) else 1.0
        return out | {"loss": out["loss"] * factor}
"""


def write_recipe(folder: Path) -> Path:
    """Write the recipe of an uneven run, and its plug-in beside it."""
    (folder / "uneven.py").write_text(UNEVEN)
    path = folder / "uneven.yaml"
    path.write_text(SMALL.replace("name: mocov3", "name: uneven") + "plugins: [uneven.py]\n")
    return path


def write_data(folder: Path) -> None:
    """Write train/ and test/ shards, 320 images and 80, of which some have no picture in them."""
    from eagleray.datasets.shards import Sample, write_shards

    for split, count in ("train", 320), ("test", 80):
        broken = range(count // BROKEN, count, count // BROKEN)
        samples = (Sample(f"s{i:04d}", "jpg", b"none" * 99 if i in broken else jpeg(i), i % 4) for i in range(count))
        write_shards(samples, str(folder / split), size=100_000)


def train_with_kills(
    args: list[str], out: str, kills: int, rng: random.Random, machines: list[Path], steps: int | None = None
) -> int:
    """Run the command again and again, on one of some `machines`, and kill it so many times: each time after a random
    number of changes of its files, or all over its so many `steps`. Return the number of kills until it had ended."""
    moments = sorted(rng.sample(range(steps - 10), kills)) if steps else []
    number = 0
    while True:
        environment = {"XDG_CACHE_HOME": str(rng.choice(machines)), "MLFLOW_TRACKING_URI": "none"}
        process = start([*args, f"out={out}", *KEYS], **environment)
        work = run_store_of(out, environment["XDG_CACHE_HOME"])
        if number < kills:
            if moments:
                wait_for_steps(work / layout.STEPS, moments[number], process)
            else:
                wait_for_changes(work, rng.randint(1, 30), process)
            time.sleep(rng.uniform(0, 0.02))  # a step, or a line, is at any place of its way
        if number == kills or process.poll() is not None:
            text = process.communicate(timeout=600)[0]
            assert process.returncode == 0, text
            return number
        process.send_signal(signal.SIGKILL)
        process.communicate()
        number += 1


def run_store_of(out: str, cache: str) -> Path:
    """The folder in which a process with this cache writes a run."""
    if not is_remote(out):
        return Path(out)
    return Path(cache, "eagleray", *run_store(out).work.parts[-3:])


def wait_for_changes(folder: Path, count: int, process: Any) -> None:
    """Wait until so many files have come, gone or grown, or the process has ended."""
    before = look(folder)
    while count > 0 and process.poll() is None:
        now = look(folder)
        count -= len(before.items() ^ now.items())
        before = now
        time.sleep(0.002)


def wait_for_steps(path: Path, count: int, process: Any) -> None:
    """Wait until the file has a line for so many steps, or the process has ended."""
    while len(read_lines(path)) < count and process.poll() is None:
        time.sleep(0.01)


def look(folder: Path) -> dict[str, int]:
    """The sizes of files by their paths."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            try:
                sizes[path] = os.path.getsize(path)
            except OSError:  # gone meanwhile
                continue
    return sizes


def told(out: str, scratch: Path) -> dict[str, Any]:
    """Return all that the histories and the summary of a run tell, but for times. Of a run in a store, they are those
    in the store."""
    folder = Path(out)
    if is_remote(out):
        RunCopy(out, folder := scratch / "copy").fetch()
    found: dict[str, Any] = {name: [of_training(r) for r in read_lines(folder / name)] for name in HISTORIES}
    return found | {layout.SUMMARY: of_training(read_summary(folder))}


def of_training(record: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a record that do not tell of time; NaN, which equals nothing, as a text."""
    kept = {k: v for k, v in record.items() if k not in OF_TIME}
    return {k: "NaN" if isinstance(v, float) and math.isnan(v) else v for k, v in kept.items()}


def assert_same_story(out: str, whole: str, scratch: Path) -> None:
    """The histories of two runs are equal line by line, but for times."""
    mine, wanted = told(out, scratch), told(whole, scratch)
    for name in HISTORIES:
        pairs = zip(mine[name], wanted[name], strict=False)
        other = [(a, b) for a, b in pairs if a != b]
        assert not other, f"{name}: {other[0]}"
        assert len(mine[name]) == len(wanted[name]), name
    assert mine[layout.SUMMARY] == wanted[layout.SUMMARY]
