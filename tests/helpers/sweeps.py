"""Sweeps of small recipes as a user starts them, and what is left of them in MLflow."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from helpers import forked
from helpers.recipes import SMALL, small_recipe

from eagleray import config
from eagleray.runs import layout, recipe
from eagleray.runs.bucket_files import histories
from eagleray.runs.sources import resolve_paths
from eagleray.storage import store
from eagleray.sweeps.sweep import put
from eagleray.sweeps.trial import Trial

LONG = 900  # seconds: machines are shared
PACKAGE = Path(__file__).parents[2] / "platform"
FIXED: dict[str, Any] = {"optim.epochs": 4, "evaluate.probe_epochs": 0, "monitor.every": 4, "checkpoint.steps": 4}


def write(path: Path, **changes: Any) -> Path:
    """A sweep of four trials of 40 steps."""
    given: dict[str, Any] = {
        "alternatives": {m: {"recipe": f"{m}.yaml"} for m in ("mocov3", "byol")},
        "fixed": FIXED,
        "space": {
            "optim.lr.value": {"log": [1.0e-4, 1.0e-2]},
            "method.momentum.value": {"uniform": [0.5, 0.99]},
        },
        "objective": {"key": "monitor/knn"},
        "trials": 4,
        "reduction": 2,
    }
    if changes.get("search") == "grid":
        del given["trials"]
    path.write_text(yaml.safe_dump(given | changes, sort_keys=False))
    return path


def start(sweep: Path, shards: Path, out: Path | str, *more: str, **environment: str) -> subprocess.Popen[str]:
    """`eagleray tune` in a process group of its own."""
    keys = [f"data.train={shards / 'train'}", f"data.test={shards / 'test'}", f"out={out}", *more]
    return forked.Popen(
        [sys.executable, "-m", "eagleray.cli", "tune", str(sweep), *keys],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE)} | environment,
        process_group=0,
    )


def wait(process: subprocess.Popen[str]) -> str:
    """What it printed, when it has ended."""
    text = process.communicate(timeout=LONG)[0]
    assert "Traceback" not in text, text
    return text


def wait_until(true: Any, process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + LONG
    while not true():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.2)


def write_long(folder: Path, trials: int) -> Path:
    """A sweep of trials of 300 steps of MoCo v3 and BYOL, for tests that interrupt it."""
    for method in ("mocov3", "byol"):
        (folder / f"{method}.yaml").write_text(small_recipe(method))
    longer = {"optim.epochs": 30, "monitor.every": 15, "checkpoint.steps": 30}
    return write(folder / "sweep.yaml", trials=trials, fixed=FIXED | longer)


def stored(url: str) -> list[dict[str, Any]]:
    """The lines of a file in a store, which may be in parts; none where it is missing."""
    folder, _, name = url.rpartition("/")
    listed = store.store(url).list(f"{folder}/", name)
    if history := histories(listed).get(name):
        data = history.read()
    else:
        data = b"".join(store.store(url).get(b.url) for b in listed if b.url == url)
    return [json.loads(line) for line in data.decode().splitlines()]


def ended(done: list[dict[str, Any]], before: dict[str, dict[str, Any]], trials: int) -> None:
    """Every trial has ended, with the values that it had before the sweep was continued."""
    assert [r["id"] for r in done] == [f"{n:03d}" for n in range(trials)]
    assert {r["state"] for r in done} <= {"finished", "stopped"}
    assert all(r["values"] == before[r["id"]]["values"] for r in done if r["id"] in before)


def trained_on(*nodes: Path) -> None:
    """Trials ran on each of some nodes, which keep their files in these folders."""
    for node in nodes:
        kept = (node / "eagleray" / "runs").rglob(layout.METRICS)
        assert any(path.parent.name == "work" for path in kept), f"no trial ran on {node.name}"


def trial_settings(shards: Path, folder: Path, trials: str, values: dict[str, Any], *more: str) -> dict[str, Any]:
    """What the process of a trial below `trials` gets: ten steps, with a number for Tune after each four, or `more`."""
    file = folder / "small.yaml"
    file.write_text(SMALL)
    keys = [f"data.train={shards / 'train'}", "optim.epochs=1", "monitor.every=4", "checkpoint.steps=4"]
    r = resolve_paths(recipe.load(str(file), [*keys, "evaluate.probe_epochs=0", *more]))
    shared = {"plugins": {}, "objective": "health/backbone_rank", "after": 0.0, "threads": 1, "command": "c"}
    return shared | {"folder": trials, "sweep": "sweep", "recipe": put(config.to_plain(r), values)}


def through(trial: Trial) -> list[dict[str, Any]]:
    """All results of a trial, to its end."""
    results = [trial.next()]
    while not results[-1].get("done"):
        results.append(trial.next())
    return results


def accounted(uri: str, title: str, trials: int) -> list[Any]:
    """MLflow's runs: one for each trial under one parent, and nothing else."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("eagleray")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    parents = [r for r in found if "mlflow.parentRunId" not in r.data.tags]
    assert len(parents) == 1
    children = [r for r in found if r.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id]
    assert sorted(r.info.run_name for r in children) == [f"{title}-{n:03d}" for n in range(trials)]
    assert parents[0].info.status == "FINISHED"
    files = {f.path for f in client.list_artifacts(parents[0].info.run_id)}
    assert {"best.yaml", "trials.csv", "keys.png", "parallel.png", "curves.png"} <= files
    each = {f"best/{r.data.params['method.name']}" for r in children}
    if len(each) > 1:
        assert {"alternatives.csv", "alternatives.png"} <= files
        assert each >= {name for name in parents[0].data.metrics if name.startswith("best/")} != set()
    return children
