"""The ratios that we claim, each measured in small, beside the best that is recorded for this kind of CPU.

Each part runs another benchmark, which compares two things in turns, for under two minutes. When a ratio is below nine
tenths of the best line of results/ratios.jsonl, the program ends with status 1; `--record` adds a line to that file.

share_of_raw, decoded_ratio_webdataset   of streaming.py
ratio_per_core, ratio_decode_crop        of loader.py
step                                     of plain_step.py
start_over_restart                       of survive.py
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import common

from eagleray.base.errors import UserError
from eagleray.cli.demo import pictures
from eagleray.datasets.shards import write_shards

RECORD = Path(__file__).with_name("results") / "ratios.jsonl"
LEAST = 0.9  # of the best that is recorded: smaller losses are noise of a shared machine
LIMIT = 600  # seconds: only a hang takes longer
PARTS: dict[str, tuple[list[str], list[str]]] = {  # the command, and the keys of its result
    "streaming": (["streaming.py", "--images", "1500", "--rounds", "3"], ["share_of_raw", "decoded_ratio_webdataset"]),
    "input": (["loader.py", "--rounds", "5"], ["ratio_per_core", "ratio_decode_crop"]),
    "step": (["plain_step.py"], ["step"]),
    "kill": (["survive.py", "--train", "SHARDS", "--every", "22", "--minutes", "0.75"], ["start_over_restart"]),
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--record", action="store_true", help="add what was measured to results/ratios.jsonl")
    args = parser.parse_args()
    found: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        write_shards(pictures(0, 2000), folder)
        for name in args.only:
            common.note(f"{name}: up to two minutes")
            found |= measure(*PARTS[name], shards=folder)
    machine = common.machine()
    known = best(machine["cpu"])
    common.show(found | {"best": known}, as_json=args.json)
    if args.record:
        with RECORD.open("a") as file:
            file.write(json.dumps(found | {"machine": machine}) + "\n")
    low = below(found, known)
    for line in low:
        print(f"error: {line}", file=sys.stderr)
    if not known:
        common.note(f"nothing is recorded for {machine['cpu']}; --record does it")
    if low:
        sys.exit(1)


def measure(command: list[str], keys: list[str], shards: str) -> dict[str, float]:
    """Return the ratios of a benchmark. Raises UserError when it fails or does not end."""
    program, *words = (shards if word == "SHARDS" else word for word in command)
    run = [sys.executable, str(Path(__file__).with_name(program)), *words, "--json"]
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise UserError(f"{program}: not ended in {LIMIT} s") from None
    if done.returncode:
        raise UserError(f"{program} ended with status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return {key: result[key] for key in keys}


def best(cpu: str) -> dict[str, float]:
    """Return the best recorded value of each ratio on this kind of CPU."""
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []
    of_kind = [line for line in lines if line["machine"]["cpu"] == cpu]
    found: dict[str, float] = {}
    for line in of_kind:
        found |= {key: max(value, found.get(key, 0)) for key, value in line.items() if key != "machine"}
    return found


def below(found: Mapping[str, float], known: Mapping[str, float]) -> list[str]:
    """Return a line for each ratio that has fallen."""
    fallen = [key for key, value in found.items() if value < LEAST * known.get(key, 0)]
    return [f"{key}: found {found[key]:.3g}, expected at least {LEAST} of {known[key]:.3g}" for key in fallen]


if __name__ == "__main__":
    common.run(main)
