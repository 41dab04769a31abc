"""Steps that the tests of tracking log, and how long that holds a step up."""

import time
from typing import Any

from eagleray.base.files import JsonLines
from eagleray.runs.mlflow_thread import MLflow

BLOCKED = 0.2  # seconds that a step may be held up: a pause of a busy machine, but no reply that is waited for


def record(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "lr": 0.1} | ({"knn/top1": 50.0} if step % 3 == 0 else {})


def logged(history: MLflow, steps: range, pause: float, lines: JsonLines | None = None) -> float:
    """Log steps one after the other. Returns the seconds of the longest call."""
    longest = 0.0
    for step in steps:
        if lines:
            lines.log(record(step))
        given = record(step)
        began = time.perf_counter()
        history.log(given)
        longest = max(longest, time.perf_counter() - began)
        time.sleep(pause)
    return longest
