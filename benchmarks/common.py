"""What the benchmarks share: where `eagleray` is, the machine, fair timing and printing."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "platform"))  # what is measured is this checkout

from eagleray.base import devices  # noqa: E402
from eagleray.base.errors import UserError  # noqa: E402
from eagleray.base.files import cache_folder  # noqa: E402
from eagleray.config.view import View  # noqa: E402

T = TypeVar("T")

DINO = (
    View(size=224, scale=(0.4, 1.0), blur=1.0),
    View(size=224, scale=(0.4, 1.0), blur=0.1, solarize=0.2),
    View(size=96, scale=(0.05, 0.4), blur=0.5, count=8),
)


def parser(text: str | None) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return out


def run(main: Callable[[], None]) -> None:
    """Exit with 2 and one line where what was given is wrong, and with 130 at Ctrl-C."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


def environment(rival: str, beside: Iterable[str] = ("torch", "torchvision", "timm")) -> Path:
    """Return the Python of an environment with a rival, such as `lightly-train==0.18.0`, and our versions of the
    packages `beside` it: all that the rival's process imports. It is made at the first use. Raises UserError."""
    same = [f"{name}=={version(name).partition('+')[0]}" for name in beside]
    folder = cache_folder("peers") / "-".join([*rival.split(), *same]).replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        note(f"installing {rival} into {folder}")
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "-q", *rival.split(), *same]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            raise UserError(f"{rival} cannot be installed: {said[-1]}")
        (folder / "complete").touch()
    return python


def note(line: str) -> None:
    """To stderr, as stdout holds the result."""
    print(line, file=sys.stderr, flush=True)


def show(result: Mapping[str, Any], *, as_json: bool) -> None:
    """One JSON object, or a table; the machine is added."""
    result = {name: short(value) for name, value in result.items()} | {"machine": machine()}
    if as_json:
        print(json.dumps(result), flush=True)
        return
    width = max(map(len, result))
    for name, value in result.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        print(f"{name:<{width}}  {value}")


def short(value: Any) -> Any:
    """A number to four digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": next(iter(devices.names()), None),
        "torch": torch.__version__,
        "commit": commit(),
    }


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str:
    """The commit, `-dirty` where files differ from it; from the environment's COMMIT in a copy without its history."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


class Seconds(NamedTuple):
    wall: float
    cpu: float  # of all threads of this process together: what a core is kept busy for, whatever else the machine does


def alternate(candidates: Mapping[str, Callable[[T], object]], inputs: Iterable[T]) -> dict[str, Seconds]:
    """Medians over rounds in which every candidate has one turn, so that a machine whose speed drifts favours none.

    Each round has an input of its own, made outside the clock. The first round warms up and is not counted.
    """
    times: dict[str, list[Seconds]] = {name: [] for name in candidates}
    for turn, given in enumerate(inputs):
        for name in list(candidates)[:: -1 if turn % 2 else 1]:
            wall, used = time.perf_counter(), time.process_time()
            out = candidates[name](given)
            times[name].append(Seconds(time.perf_counter() - wall, time.process_time() - used))
            del out
    return {name: Seconds(*map(statistics.median, zip(*rows[1:], strict=True))) for name, rows in times.items()}


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked for."""
    devices.synchronize(device)


def device() -> torch.device:
    return devices.current()
