"""Walk the mission: `make mission`. A cluster that loses a worker and a node trains on shards of a bucket, a sweep has
one tree in MLflow, and timm loads what was evaluated and exported.

    make mission BREAK=lost-step        plants a fault, which must be reported
    make mission FOLDER=walk            keeps all state in a folder
    make mission FOLDER=walk FROM=tune UNTIL=tune

A station prints one line. The first that fails ends the walk with status 1.
"""

import argparse
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from mission.breaks import BREAKS
from mission.checks import Wrong
from mission.site import opened
from mission.stations import STATIONS

NAMES = list(STATIONS)
ON_A_CLUSTER = {"cluster", "pretrain", "tune"}


def walk(folder: Path, chosen: list[str], fault: str) -> str:
    """Walk some stations, and return what was wrong at the one that failed, or nothing."""
    planted, before, harm = BREAKS.get(fault, ("", False, lambda site: None))
    with opened(folder, cluster=bool(ON_A_CLUSTER & {*chosen})) as site:
        for name in [n for n in NAMES if n in chosen or (n == "cluster" and site.head)]:
            act, check = STATIONS[name]
            began = time.monotonic()
            try:
                for does in [harm] * (name == planted and before) + [act] + [harm] * (name == planted and not before):
                    does(site)
                said = check(site)
            except Exception as e:
                text = str(e) if isinstance(e, Wrong) else f"{type(e).__name__}: {' '.join(str(e).split())}"
                return f"{name}: {text}"
            print(f"{name:10}{time.monotonic() - began:5.0f} s  {said}", flush=True)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", choices=NAMES, default=NAMES[0], dest="start")
    parser.add_argument("--until", choices=NAMES, default=NAMES[-1])
    parser.add_argument("--break", choices=["", *BREAKS], default="", dest="fault")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began, kept = time.monotonic(), options.folder and options.folder.absolute()
    folder = kept or Path(tempfile.mkdtemp(prefix="mission-"))
    folder.mkdir(parents=True, exist_ok=True)
    chosen = NAMES[NAMES.index(options.start) : NAMES.index(options.until) + 1]
    try:
        wrong = walk(folder, chosen, options.fault)
    except KeyboardInterrupt:
        wrong = "interrupted"
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(u.ru_utime + u.ru_stime for u in used)
    print(f"{'all':10}{time.monotonic() - began:5.0f} s  {cpu:.0f} s of CPU time")
    if wrong:
        print(f"error: {wrong}\nlogs: {folder}: logs/, ray/, s3/log/, mlflow/server.log")
    elif not kept:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
