"""Train what others have published, in pieces that continue each other, and print our number beside theirs.

    python benchmarks/published.py [RECIPE ...] [--minutes 10] [--epochs N] [--out FOLDER] [key=value ...]

Each recipe has the settings and the protocol of its source, and says in its note what differs. A piece ends after so
many minutes with a checkpoint; the same command goes on, on any machine that has the folder of the runs. `--epochs N`
ends early, with the schedule of the whole length: to see that it works. Keys, such as `data.train=`, are of every
recipe; one whose data are not there is left out with a line. Nothing is fetched, and neither Ray nor MLflow is needed.
"""

import argparse
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common

from eagleray.base.errors import UserError
from eagleray.config import bundled
from eagleray.data.index import open_index
from eagleray.engine.world import local
from eagleray.runs import recipe
from eagleray.runs.pretrain import pretrain
from eagleray.runs.sources import resolve_paths
from eagleray.runs.tracking import Tracking

NAMES = sorted(name for name in bundled.names() if name.startswith("published_"))
MEASURES = {"knn": "knn/top1", "linear": "linear/top1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RECIPE | key=value", help=f"by default all of {', '.join(NAMES)}")
    parser.add_argument("--minutes", type=float, default=10, help="time for all of them together")
    parser.add_argument("--epochs", type=int, help="end after so many")
    parser.add_argument("--out", type=Path, default=Path("runs/published"), help="folder of the runs")
    args = parser.parse_intermixed_args()
    logging.disable(logging.WARNING)
    keys = [word for word in args.words if "=" in word]
    end, left_out = time.monotonic() + 60 * args.minutes, list[str]()
    names = [word for word in args.words if "=" not in word] or NAMES
    for name in names:
        if name not in NAMES:
            raise UserError(f"{name}: expected one of {', '.join(NAMES)}")
        given = [f"out={args.out / name}", "workers=0", *keys]
        try:
            print(f"{name}: {train(name, given, end - time.monotonic(), args.epochs)}", flush=True)
        except UserError as e:  # such as data that are not there
            left_out.append(f"{name}: {e}")
            common.note(f"left out: {left_out[-1]}")
    if len(left_out) == len(names):
        raise UserError("nothing was trained")


def train(name: str, keys: list[str], seconds: float, epochs: int | None) -> str:
    """Train for so many seconds, and return what was reached in words. Raises UserError."""
    if seconds <= 0:
        return "no time is left; the same command goes on"
    chosen = resolve_paths(recipe.load(name, keys))
    if epochs:
        [source] = chosen.data.sources()[:1]
        images = len(open_index(source.url, common.cache_folder("published"), note=common.note))
        chosen = resolve_paths(recipe.load(name, [*keys, f"max_steps={epochs * (images // chosen.optim.batch)}"]))
    stop = threading.Event()
    clock = threading.Timer(seconds, stop.set)
    clock.start()
    begun = time.monotonic()
    try:
        summary = pretrain(chosen, local(), tracking=Tracking("none"), stop=stop)
    finally:
        clock.cancel()
    took = f"{time.monotonic() - begun:.0f} s on {common.machine()['gpu'] or common.cpu()}"
    if not summary:
        return f"stopped after {took}; the same command goes on"
    part = f", after {epochs} of {chosen.optim.epochs} epochs" if epochs else ""
    return f"{beside(summary, bundled.recipe(name).published)} ({took}{part})"


def beside(summary: Mapping[str, Any], published: Any) -> str:
    """Return our numbers, each beside the published one."""
    row = published if isinstance(published, Mapping) else published[0]
    parts = [
        f"{name} {summary[key]:.1f} % beside {row[name]} % that is published"
        for name, key in MEASURES.items()
        if name in row and key in summary
    ]
    return ", ".join(parts) or f"no number beside {json.dumps(row)}"


if __name__ == "__main__":
    common.run(main)
