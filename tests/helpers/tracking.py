"""Steps that the tests of tracking log, how long that holds a step up, and what MLflow then has."""

import time
from pathlib import Path
from typing import Any

from eagleray.base.files import JsonLines
from eagleray.runs.mlflow_log import MLflow

BLOCKED = 0.8  # seconds that a step may be held up: a pause of a busy machine, but no reply that is waited for


def record(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "lr": 0.1} | ({"knn/top1": 50.0} if step % 3 == 0 else {})


def logged(history: MLflow, steps: range, pause: float = 0) -> float:
    """Log steps one after the other, after those in metrics.jsonl before them. Returns the seconds of the longest
    call."""
    lines = JsonLines(history.out / "metrics.jsonl", step=steps.start - 1)
    longest = 0.0
    for step in steps:
        lines.log(record(step))
        began = time.perf_counter()
        history.log(record(step))
        longest = max(longest, time.perf_counter() - began)
        time.sleep(pause)
    return longest


def the_run(uri: str, name: str) -> tuple[Any, Any]:
    """MLflow's client, and its only run of that name."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("eagleray")
    [run] = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    return client, run


def steps_there(uri: str, out: Path, metric: str = "loss") -> list[int]:
    """The steps of a number of a run, as often as MLflow has each."""
    client, run = the_run(uri, out.name)
    return sorted(m.step for m in client.get_metric_history(run.info.run_id, metric))
