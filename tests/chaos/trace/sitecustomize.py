"""A run's own account of the samples that it was given, for any process that inherits this folder on PYTHONPATH.

With EAGLERAY_TRACE=DIR, `Loader.batches` writes one JSON line per step that it hands over to `DIR/rank-<pid>.jsonl`,
and with EAGLERAY_PACE=SECONDS it takes at least so long over one. With EAGLERAY_SAVE=SECONDS, so does a checkpoint.
With EAGLERAY_HANGING=SECONDS, a process counts as dead after so long without a sign of life.
With EAGLERAY_UNREADABLE=RANK, no image of an evaluation can be read on that rank.
With EAGLERAY_SKEW=SECONDS, the clock of the machine is so much ahead.
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


class Hook:
    """Patches a few modules once they have been imported; all other imports are none of its business."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in PATCHES else None
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def patched(module: ModuleType) -> None:
                execute(module)
                PATCHES[name](module)

            spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


def traced(batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def wrapped(loader: Any, start: int, *more: Any, **options: Any) -> Iterator[Any]:
        index = loader.stream.index
        # Ranks that began together meet at one port, in one attempt; where there is none, there is one rank.
        port, number = os.environ.get("MASTER_PORT"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
        attempt = f"{port or os.getpid()} attempt {number} from {start}"
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


def slowed(verify: Callable[..., None]) -> Callable[..., None]:
    def wrapped(*given: Any) -> None:
        time.sleep(float(os.environ.get("EAGLERAY_SAVE", "0")))
        verify(*given)

    return wrapped


def patch_loader(module: ModuleType) -> None:
    module.Loader.batches = traced(module.Loader.batches)  # type: ignore[attr-defined]


def patch_checkpoint(module: ModuleType) -> None:
    """A checkpoint is written, but it does not count yet."""
    module.Writer._verify = slowed(module.Writer._verify)  # type: ignore[attr-defined]


def unreadable(embedded: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*given: Any) -> Any:
        if os.environ.get("EAGLERAY_UNREADABLE", "none") == os.environ.get("RANK", "0"):
            raise RuntimeError("no image can be read")
        return embedded(*given)

    return wrapped


def patch_features(module: ModuleType) -> None:
    module.embedded = unreadable(module.embedded)  # type: ignore[attr-defined]


def patch_spares(module: ModuleType) -> None:
    module.HANGING = float(os.environ.get("EAGLERAY_HANGING", module.HANGING))  # type: ignore[attr-defined]


PATCHES = {
    "eagleray.cluster.spares": patch_spares,
    "eagleray.data.loader": patch_loader,
    "eagleray.engine.checkpoint": patch_checkpoint,
    "eagleray.protocols.features": patch_features,
}


def skew(seconds: float) -> None:
    honest = time.time
    time.time = lambda: honest() + seconds


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
    if ahead := os.environ.get("EAGLERAY_SKEW"):  # else the clock stays as it is: Ray pickles it where runs are elastic
        skew(float(ahead))
