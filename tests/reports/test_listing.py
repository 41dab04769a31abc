"""`eagleray runs` lists what is in a folder of runs."""

import json
import math
from pathlib import Path

import pytest
from helpers.bucket import CountingBucket
from typer.testing import CliRunner

from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.reports.listing import DEPTH, by_score, list_runs, run_folders
from eagleray.storage import store


def run(folder: Path, time: float, scores: list[float], steps: int | None = None) -> None:
    """Write the folder of a run with one evaluation a step."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("method: {name: simclr}\nmax_steps: 9\n")
    records = [{"step": i, "loss": 5.0 - i, "knn/top1": s} for i, s in enumerate(scores, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "starts.jsonl").write_text(json.dumps({"step": 0, "ranks": 1, "time": time}) + "\n")
    if steps is not None:
        (folder / "summary.json").write_text(json.dumps({"steps": steps}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run(tmp_path / "old", 1e9, [10.0, 40.0, 30.0], 3)
    run(tmp_path / "deep" / "new", 2e9, [20.0, 35.0])
    run(tmp_path / "none", 1.5e9, [])
    run(tmp_path / "old" / "inside", 3e9, [99.0])  # a part of a run
    run(tmp_path / "/".join("abcdef"[: DEPTH + 1]), 3e9, [99.0])  # too deep
    (tmp_path / "other").mkdir()
    return tmp_path


def test_runs_are_listed_by_time_and_by_score(folder: Path) -> None:
    found = list_runs(str(folder), "knn/top1")
    assert [r.name for r in found] == ["deep/new", "none", "old"]
    assert [(r.best, r.last, r.step, r.steps) for r in found] == [(35, 35, 2, 9), (None, None, 0, 9), (40, 30, 3, 9)]
    assert [r.state for r in found] == ["broken off", "broken off", "finished"]
    assert [r.name for r in by_score(found, "knn/top1")] == ["old", "deep/new", "none"]
    losses = list_runs(str(folder), "loss")
    assert [r.best for r in losses] == [3, None, 2]
    assert [r.name for r in by_score(losses, "loss")] == ["old", "deep/new", "none"], "a lower loss is better"


def test_what_mlflow_keeps_of_a_run_is_no_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store.STORES, "s3", CountingBucket(folder.parent))
    kept = folder / "mlflow-artifacts" / "0a1b" / "artifacts"
    kept.mkdir(parents=True)
    (kept / "recipe.yaml").write_text("method: {name: simclr}\n")
    run(folder / "artifacts", 5e8, [])
    run(folder / "old-1", 5e8, [])  # between `old` and `old/inside` in the order of letters
    (folder / "artifacts" / "environment.json").write_text("{}")
    for root in str(folder), f"s3://{folder.name}":
        assert [Path(out).name for out in sorted(run_folders(root))] == ["artifacts", "new", "none", "old", "old-1"]


def test_the_command_prints_a_table_and_json(folder: Path) -> None:
    done = CliRunner().invoke(main.app, ["runs", str(folder), "--best", "knn"])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert rows[0][:5] == ["RUN", "METHOD", "STATE", "STEP", "BEST"]
    assert rows[1][:7] == ["old", "simclr", "finished", "3", "of", "9", "40"]
    assert list_runs(folder, "knn") == list_runs(folder, "knn/top1")
    done = CliRunner().invoke(main.app, ["runs", str(folder), "--json", "--best", "loss"])
    assert [(r["name"], r["best"]) for r in json.loads(done.output)] == [("old", 2), ("deep/new", 3), ("none", None)]
    done = CliRunner().invoke(main.app, ["runs", str(folder), "--json"])
    assert [r["name"] for r in json.loads(done.output)] == ["deep/new", "none", "old"]


def test_a_run_without_knn_shows_its_loss(folder: Path) -> None:
    metrics = folder / "none" / "metrics.jsonl"
    metrics.write_text(
        "".join(json.dumps({"step": i, "loss": loss}) + "\n" for i, loss in enumerate((4.0, 2.5, 3.0), 1))
    )
    rows = [line.split() for line in CliRunner().invoke(main.app, ["runs", str(folder)]).output.splitlines()]
    assert [row[0] for row in rows] == ["RUN", "deep/new", "none", "old"]
    assert rows[2][-6:-2] == ["loss", "2.5", "loss", "3"]
    assert "loss" not in rows[1] + rows[3]
    asked = CliRunner().invoke(main.app, ["runs", str(folder), "--metric", "knn"]).output
    assert "loss" not in asked


def test_a_damaged_run_does_not_hide_the_others(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "old" / "summary.json").write_text("{")
    found = {run.name: run for run in list_runs(str(folder), "knn/top1")}
    assert [found[name].state for name in ("deep/new", "none", "old")] == ["broken off", "broken off", "damaged"]
    assert [r.getMessage() for r in caplog.records] == [f"{folder / 'old' / 'summary.json'}: not valid JSON"]


@pytest.mark.parametrize(
    ("where", "metric", "line"),
    [
        ("other", "knn/top1", "other: no runs there; expected a folder with runs up to 4 folders below it"),
        ("gone", "knn/top1", "gone: no such folder; expected one with runs in it"),
        ("old", "knn/top7", "knn/top7: no metric of runs; choose one of"),
    ],
)
def test_wrong_input_gets_a_line(folder: Path, where: str, metric: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        list_runs(str(folder / where), metric)


def test_a_number_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    for name, losses in {"a": [math.nan, 3.0, 2.0], "b": [1.0, math.inf], "c": [math.nan]}.items():
        run(tmp_path / name, 1e9, [0.0] * len(losses))
        records = [{"step": i, "loss": loss} for i, loss in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = by_score(list_runs(str(tmp_path), "loss"), "loss")
    assert [(r.name, r.best) for r in found] == [("b", 1.0), ("a", 2.0), ("c", None)]


def test_a_run_that_went_on_does_not_show_numbers_of_its_first_end_as_the_newest(tmp_path: Path) -> None:
    run(tmp_path / "run", 1e9, [20.0, 30.0, 25.0])
    summary = tmp_path / "run" / "summary.json"
    summary.write_text(json.dumps({"steps": 2, "knn/top1": 35.0}))
    [found] = list_runs(str(tmp_path), "knn/top1")
    assert (found.last, found.best, found.state) == (25, 35, "broken off"), "35 was measured, but at step 2"
    summary.write_text(json.dumps({"steps": 3, "knn/top1": 35.0}))
    [found] = list_runs(str(tmp_path), "knn/top1")
    assert (found.last, found.best, found.state) == (35, 35, "finished")


def test_a_file_that_cannot_be_read_does_not_hide_the_others(folder: Path) -> None:
    (folder / "old" / "summary.json").unlink(missing_ok=True)
    (folder / "old" / "summary.json").mkdir()  # an OSError for root as well
    assert {r.name: r.state for r in list_runs(str(folder), "knn/top1")}["old"] == "damaged"
