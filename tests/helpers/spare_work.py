"""What a process that `eagleray.cluster.spares` has forked does in a test."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from eagleray.cluster.spares import WorkerLine


def work(line: WorkerLine, attempt: int, why: str, folder: Path, rank: int, plan: dict[int, str]) -> None:
    """Note in the folder that an attempt has begun, then do what `plan` says for it; by default the rank is done."""
    deed = plan.get(attempt, "done")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) if deed == "with a child" else None
    part = folder / f".rank-{rank}-{attempt}"
    part.write_text(f"{os.getpid()} {child.pid if child else 0} {why}")
    part.rename(folder / f"rank-{rank}-{attempt}")
    while deed in ("stand still", "with a child"):
        time.sleep(0.05)
    while deed in ("be preempted", "be done when told") and not line.told("warned"):
        time.sleep(0.05)
    if deed == "exit":
        os._exit(3)
    if deed == "fail for good":
        line.send("fail", {"user": True, "why": "no such key"})
    if deed == "miss the other":
        other, _, _ = begun(folder, 1 - rank, attempt)
        wait_until_gone(other)
        time.sleep(0.3)
    word = {"be preempted": "preempted", "miss the other": "failed"}.get(deed, "failed" if "fail" in deed else "done")
    kept = [{"why": f"error of rank {rank}"}] if deed in ("fail with an error", "miss the other") else []
    line.send(word, kept[0]["why"] if kept else f"{word} in attempt {attempt}", *kept)
    line.wait_for("go")


def wait_until_gone(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.01)


def begun(folder: Path, rank: int, attempt: int, seconds: float = 60) -> tuple[int, int, str]:
    """Wait until a rank has begun an attempt; return its process, the one below it, and why the attempt was made."""
    path, end = folder / f"rank-{rank}-{attempt}", time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name}: not begun"
        time.sleep(0.02)
    process, child, why = path.read_text().split(" ", 2)
    return int(process), int(child), why
