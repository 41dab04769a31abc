"""What runs took and what they reached, on the page that compares them."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.run_folder import SUMMARY, write_run

from eagleray.reports import compare
from eagleray.reports.read import Run, read

GIVEN = {"architecture": "1", "data": {}, "data_digest": "", "date": "2026-11-21", "seconds": 1.0, "untrained": False}
ON = {"size": 224, "batch": 4, "device": "CPU", "precision": "float32", "threads": 1}


def measured(folder: Path, speed: float, size: float, **on: Any) -> None:
    """Give a run a result of the throughput protocol."""
    numbers = {"throughput/images_per_s": speed, "throughput/params_m": size}
    result = GIVEN | {"protocol": "throughput", "settings": ON | on, "numbers": numbers}
    result |= {"backbone": str(folder), "backbone_digest": folder.name}
    (folder / "results.json").write_text(json.dumps([result]))


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Run]:
    """Two runs of one method, one of another, and one that was never measured."""
    scores = {"small": 40.5, "large": 44.5, "other": 42.5, "unmeasured": 99.5}
    took = {"steps": 200, "epochs": 2.0, "wall_seconds": 72.0}
    folders = {name: write_run(tmp_path / name, summary=took | {"knn/top1": score}) for name, score in scores.items()}
    other = folders["other"] / "recipe.yaml"
    other.write_text(other.read_text().replace("name: mocov3", "name: simsiam"))
    measured(folders["small"], 100.0, 5.5)
    measured(folders["large"], 20.0, 21.5)
    measured(folders["other"], 50.0, 22.5)
    return {name: read(str(folder)) for name, folder in folders.items()}


def words(runs: dict[str, Run], folder: Path) -> dict[str, str]:
    pictures = [p.alt.partition(": ") for p in compare.accuracy_over_cost(runs, folder)]
    return {title: text for title, _, text in pictures}


def test_accuracy_is_drawn_over_speed_and_size(runs: dict[str, Run], tmp_path: Path):
    of = "small (mocov3) 40.5 at {}; large (mocov3) 44.5 at {}; other (simsiam) 42.5 at {}"
    assert words(runs, tmp_path) == {
        "knn/top1, % over images/s of a forward pass": of.format(100, 20, 50),
        "knn/top1, % over million parameters": of.format(5.5, 21.5, 22.5),
    }
    assert len(list(tmp_path.glob("knn-top1-over-*.png"))) == 2


def test_speeds_of_two_devices_are_not_compared(runs: dict[str, Run], tmp_path: Path):
    measured(runs["large"].folder, 2000.0, 21.5, device="NVIDIA H100")
    runs["large"] = read(runs["large"].out)
    assert list(words(runs, tmp_path)) == ["knn/top1, % over million parameters"]
    tables = [t for t in compare.results(runs) if t.caption.startswith("throughput")]
    assert [t.rows[0][1:] for t in tables] == [[100.0, None, 50.0, None], [None, 2000.0, None, None]]
    assert ["NVIDIA H100" in t.caption for t in tables] == [False, True]


def test_accuracies_of_other_settings_are_not_in_one_plot(runs: dict[str, Run], tmp_path: Path):
    recipe = runs["large"].folder / "recipe.yaml"
    changed = recipe.read_text().replace("temperature: 0.07", "temperature: 0.5")
    assert changed != recipe.read_text()
    recipe.write_text(changed)
    runs["large"] = read(runs["large"].out)
    assert all("large" not in text for text in words(runs, tmp_path).values())
    assert words({name: runs[name] for name in ("small", "large")}, tmp_path) == {}


def test_hours_are_those_of_all_workers(runs: dict[str, Run]):
    [table] = compare.hours(runs)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["Run"], row["Device"], row["Workers"]) == ("small", "CPU", 2)
    assert (row["Hours"], row["Worker hours"]) == (0.02, 0.04)
    assert (row["Hours per 100 epochs"], row["Worker hours per 100"]) == (1.0, 2.0)
    assert len(table.rows) == 4


def test_epochs_that_a_run_took_over_are_not_among_those_of_its_hours(runs: dict[str, Run]):
    starts = runs["small"].folder / "starts.jsonl"
    starts.write_text(json.dumps({"step": 100, "ranks": 2, "time": 1.7e9}) + "\n")
    [table] = compare.hours({"small": read(runs["small"].out)})
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["Hours"], row["Hours per 100 epochs"]) == (0.02, 2.0)


def test_a_run_that_is_not_done_has_no_hours_yet(tmp_path: Path):
    assert compare.hours({"a": read(str(write_run(tmp_path / "a", summary=None)))}) == []
    assert len(compare.hours({"b": read(str(write_run(tmp_path / "b", summary=SUMMARY)))})) == 1
