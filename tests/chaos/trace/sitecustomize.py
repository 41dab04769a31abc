"""A run's own account of the samples that it was given, for any process that inherits this folder on PYTHONPATH.

With EAGLERAY_TRACE=DIR, `Loader.batches` writes one JSON line per step that it hands over to `DIR/rank-<pid>.jsonl`,
and with EAGLERAY_PACE=SECONDS it takes at least so long over one.
Nothing else changes: a `sitecustomize` of the site's own, which this one hides, is run as well.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

TRACED = "eagleray.data.loader"


class Hook:
    """Patches the loader's module once it has been imported; all other imports are none of its business."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == TRACED else None
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def patched(module: ModuleType) -> None:
                execute(module)
                module.Loader.batches = traced(module.Loader.batches)

            spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


def traced(batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def wrapped(loader: Any, start: int, *more: Any, **options: Any) -> Iterator[Any]:
        index = loader.stream.index
        # Ranks that began together meet at one port; where there is none, there is one rank.
        attempt = f"{os.environ.get('MASTER_PORT') or os.getpid()} from {start}"
        for step, (batch, bad) in enumerate(batches(loader, start, *more, **options), start + 1):
            rows = batch.index.numpy()
            places = zip(index.shard[rows].tolist(), index.offset[rows].tolist(), strict=True)
            line = {
                "attempt": attempt,
                "step": step,
                "epoch": (step - 1) // loader.stream.steps_per_epoch,
                "rank": loader.rank,
                "rows": batch.rows,
                "samples": [f"{index.shards[s].url.rpartition('/')[2]}:{offset}" for s, offset in places],
                "labels": batch.label.tolist(),
            }
            append(json.dumps(line))
            time.sleep(float(os.environ.get("EAGLERAY_PACE", "0")))
            yield batch, bad

    return wrapped


def append(line: str) -> None:
    """With one write and no buffer, so that a line is there or not when the process is killed."""
    path = os.path.join(os.environ["EAGLERAY_TRACE"], f"rank-{os.getpid()}.jsonl")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)


def run_hidden() -> None:
    """The `sitecustomize` that would have been found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [p for p in sys.path if os.path.abspath(p) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_hidden()
if os.environ.get("EAGLERAY_TRACE"):
    sys.meta_path.insert(0, Hook())  # type: ignore[arg-type]
