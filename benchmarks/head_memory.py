"""Measure what submitted runs take of the memory of a cluster's head, which computes nothing itself.

A head of Ray and one node with one CPU run on this machine. The first run trains on the node, for which Ray Train adds
three processes to those that each run has on the head, and the others wait for the node. The memory is that of all
processes of the head, in MiB, by number of runs; `rss` counts a shared page for everyone who shares it, and `pss` once.
"""

import re
import time
from collections import Counter
from typing import Any

import common
import memory
import synthetic

common.sys.path.insert(0, str(common.ROOT / "tests"))

from helpers import ray_head  # noqa: E402
from helpers.recipes import SMALL  # noqa: E402

CONTROLLER = "TrainController"
SETTLED = 30.0  # seconds after that in which the processes of a run are complete
LIMIT = 900.0  # seconds until Ray Train controls a run


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 4], help="numbers of runs at the same time")
    args = parser.parse_args()
    with ray_head.running(cpus=0) as head:
        head.join("node")
        synthetic.write(head.folder / "train", images=64, width=32, height=32, each=32)
        (head.folder / "small.yaml").write_text(SMALL)
        found = {0: measure(head)}
        for number in range(1, max(args.runs) + 1):
            submit(head, number)
            if number in args.runs:
                time.sleep(SETTLED)
                found[number] = measure(head)
                common.note(f"{number} run(s): {found[number]}")
    most = max(found)
    result: dict[str, Any] = {}
    for kind in ("rss", "pss"):
        whole = {runs: sum(getattr(m, kind) for m in by_name.values()) for runs, by_name in found.items()}
        result[kind] = {str(runs): round(mib) for runs, mib in whole.items()}
        result[f"{kind}_per_run"] = round((whole[most] - whole[0]) / most)
    result["rss_of_processes"] = {name: round(m.rss) for name, m in sorted(found[min(args.runs)].items())}
    common.show(result, as_json=args.json)


def submit(head: ray_head.Head, number: int) -> None:
    """Submit the run of this number, and wait until Ray Train controls it."""
    out = head.folder / f"run{number}"
    keys = ["workers=1", "gpus=false", "optim.epochs=100000", "monitor.every=100000", "evaluate.probe_epochs=0"]
    code, text = head("submit", head.folder / "small.yaml", f"data.train={head.folder / 'train'}", f"out={out}", *keys)
    assert code == 0, text
    end = time.monotonic() + LIMIT
    while f"{CONTROLLER} x{number}" not in measure(head):
        assert time.monotonic() < end, head("logs", head.jobs()[-1]["id"])[1]
        time.sleep(2)


def measure(head: ray_head.Head) -> dict[str, memory.Memory]:
    """Return the memory of the head's processes by their names; those of one name are added up."""
    found = memory.below(head.process.pid, lambda _, command: name(command))
    counts = Counter({kind: len(each) for kind, each in found.items()})
    return {f"{k} x{counts[k]}": memory.Memory(*map(sum, zip(*each, strict=True))) for k, each in found.items()}


def name(command: list[str]) -> str:
    """Return a short name of a process by its command line."""
    line = " ".join(command)
    if known := re.match(r"ray::(?:_ray_internal_job_actor\S*:)?(\w+)", line):
        return known[1]
    if "job_start.py" in line:
        return "starter"
    if "eagleray.cli" in line:
        return "driver"
    return "shell" if line.startswith(("/bin/sh", "sh ")) else "ray itself"


if __name__ == "__main__":
    common.run(main)
