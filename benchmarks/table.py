"""A short table of gpu.sh's JSON lines."""

import json
import sys
from pathlib import Path
from typing import Any

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
    "planned": "planned_memory_mib",
    "TFLOP/s": "tflops",
}


def main(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    results = [row["result"] if isinstance(row["result"], dict) else {"printed": row["result"]} for row in rows]
    names = [row["name"] + (f" {r['case']}" if "case" in r else "") for row, r in zip(rows, results, strict=True)]
    width = max(24, *map(len, names)) if names else 24
    print(f"{'':<{width}}{'status':>8}" + "".join(f"{name:>10}" for name in COLUMNS))
    for name, row, result in zip(names, rows, results, strict=True):
        status = "failed" if "error" in result and row["status"] == "ok" else row["status"]
        values = [result.get(key, "") for key in COLUMNS.values()] if "step_ms" in result else []
        print(f"{name:<{width}}{status:>8}" + "".join(f"{value:>10}" for value in values))
    for row, result in zip(rows, results, strict=True):
        if "methods" in result:
            show_methods(row["name"], result["methods"])
        elif "step_ms" not in result:
            case = f" {result['case']}" if "case" in result else ""
            words = (f"{k} {v}" for k, v in result.items() if k not in ("machine", "case"))
            print(f"{row['name']}{case}: " + ", ".join(words))
    machines = [result["machine"] for result in results if "machine" in result]
    if machines:
        print(", ".join(f"{k} {v}" for k, v in machines[0].items()))


def show_methods(name: str, methods: dict[str, dict[str, Any]]) -> None:
    """Print how many methods passed, and the error of each that did not."""
    failed = {method: row["status"] for method, row in methods.items() if row["status"] != "ok"}
    print(f"{name}: {len(methods) - len(failed)} of {len(methods)} passed")
    for method, status in failed.items():
        print(f"  {method}: {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
