"""`eagleray track`: what MLflow lacks of a run in a folder or in a store is sent once, and mistakes are one line."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.bucket import CountingBucket
from helpers.commands import refused, run, status
from helpers.processes import free_port
from helpers.tracking import record, steps_there, the_run

from eagleray.base import files
from eagleray.runs import layout
from eagleray.runs.run_store import run_store
from eagleray.storage import store


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run at s3://runs/run, of which MLflow knows nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(tmp_path))
    (folder := tmp_path / "runs" / "run").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("seed: 0\nmethod: {name: dino}\n")
    run_store("s3://runs/run").append(layout.METRICS, "".join(json.dumps(record(n)) + "\n" for n in range(1, 6)))
    (folder / "summary.json").write_text(json.dumps({"steps": 5, "knn/top1": 50.0}))
    return folder


def test_a_run_in_a_store_is_sent_once(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """From another machine, too: its id is in the store."""
    for wanted in ("2 parameters, 13 numbers, status FINISHED, 2 files", "nothing was missing"):
        run("track", "s3://runs/run")
        [line] = capsys.readouterr().out.splitlines()
        assert line.endswith(f": {wanted}")
        shutil.rmtree(tmp_path / "cache")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert steps_there(uri, out) == [1, 2, 3, 4, 5]
    assert the_run(uri, "run")[1].data.params == {"seed": "0", "method.name": "dino"}


def test_what_cannot_be_sent_is_one_line(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert "no such folder; expected the folder or s3:// URL of a run" in refused(capsys, "track", str(tmp_path / "x"))
    with files.lock_folder(out, layout.OWNER):
        assert "the run is running; expected one that has ended or was stopped" in refused(capsys, "track", str(out))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "localhost:5000")
    assert "MLflow at localhost:5000: " in refused(capsys, "track", str(out))
    monkeypatch.setattr("eagleray.runs.mlflow_run.RETRIES", 0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    assert status("track", str(out)) == 75
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("Connection refused")
