"""A short table of gpu.sh's JSON lines."""

import json
import sys
from pathlib import Path

COLUMNS = {
    "images/s": "images_per_s",
    "step ms": "step_ms",
    "forward": "forward_ms",
    "backward": "backward_ms",
    "clip": "clip_ms",
    "optim": "optimizer_ms",
    "ema": "ema_ms",
    "rest": "rest_ms",
    "wait": "data_wait",
    "MiB": "peak_memory_mib",
}


def main(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    print(f"{'':<18}{'status':>8}" + "".join(f"{name:>10}" for name in COLUMNS))
    for row in rows:
        result = row["result"] if isinstance(row["result"], dict) else {}
        values = [result.get(key, "") for key in COLUMNS.values()] if "step_ms" in result else []
        print(f"{row['name']:<18}{row['status']:>8}" + "".join(f"{value:>10}" for value in values))
    for row in rows:
        if isinstance(row["result"], str):
            print(f"{row['name']}: {row['result']}")
        elif "step_ms" not in row["result"]:
            print(f"{row['name']}: " + ", ".join(f"{k} {v}" for k, v in row["result"].items() if k != "machine"))
    machines = [row["result"]["machine"] for row in rows if isinstance(row["result"], dict)]
    if machines:
        print(", ".join(f"{k} {v}" for k, v in machines[0].items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
