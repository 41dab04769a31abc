"""The folders of a run and of a sweep, written without training."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagleray import config
from eagleray.reports import page, plots
from eagleray.runs import recipe
from eagleray.runs.plots import Panel
from eagleray.sweeps import sweep

SUMMARY = {"knn/top1": 32.82, "knn/top1_untrained": 27.94, "linear/top1": 38.77000045776367, "linear/lr": 0.1}
SUMMARY |= {"steps": 200, "epochs": 2.0, "images": 6400, "wall_seconds": 71.2, "restarts": 1, "steps_repeated": 7}
SUMMARY |= {"seconds_lost": 3.5, "goodput": 0.91, "bad_samples": 3}


def records(n: int = 20) -> list[dict[str, float]]:
    look = {"health/backbone_std": 0.7, "health/backbone_rank": 12.5, "health/update": 1e-3, "monitor/knn": 31.25}
    every = {"lr": 1e-3, "images_per_s": 120.0, "data_wait": 0.05, "grad/patch_embed": 0.2, "grad/blocks.00": 0.4}
    return [
        {"step": 10 * i, "epoch": i / 10, "loss": 5.0 - i / 10} | every | (look if i % 3 == 0 else {})
        for i in range(1, n + 1)
    ]


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))


def write_run(folder: Path, *overrides: str, summary: dict[str, Any] | None = SUMMARY) -> Path:
    """Write the folder of a run, which is done if it has a summary, and return the folder."""
    folder.mkdir()
    r = recipe.load("mocov3_vitxs8_cifar10_ep2", ["data.train=s3://bucket/train", *overrides])
    (folder / "recipe.yaml").write_text(config.dump(r))
    packages = {"packages": {"torch": "2.11"}, "python": "3.11.7", "command": ["eagleray", "pretrain"]}
    (folder / "environment.json").write_text(json.dumps(packages))
    lines(folder / "metrics.jsonl", records())
    lines(folder / "starts.jsonl", [{"step": 0, "ranks": 2, "time": 1.7e9}])
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def sweep_of(folder: Path) -> None:
    """The folder of a sweep whose three trials are done."""
    folder.mkdir()
    made = sweep.load("cifar10_small", ["sweep.trials=3", f"out={folder}", "data.train=s3://bucket/train"])
    (folder / "sweep.yaml").write_text(config.dump(made))
    values = [{"optim.lr.value": 1e-3 * (i + 1), "method.momentum.value": 0.9} for i in range(3)]
    rows = [
        {"id": f"00{i}", "alternative": "byol", "values": values[i], "state": "finished", "step": 8, "steps": 8}
        | {"metric": metric, "seconds": 1.0, "why": ""}
        for i, metric in enumerate((30.25, 41.5, 20.75))
    ]
    lines(folder / "trials.jsonl", rows)
    reports = [{"id": r["id"], "step": 8, "percent": 100.0, "value": r["metric"], "time": 1.0} for r in rows]
    lines(folder / "reports.jsonl", reports)


def describe_curves(patch: pytest.MonkeyPatch) -> None:
    """Have curves described, but not drawn, which is most of what a page takes time for."""

    def described(panel: Panel, found: Any, caption: str, folder: Path, *, findings: Any = (), x: str = "step") -> Any:
        return page.Picture("data:image/png;base64,", plots.in_words(panel, found, x), caption)

    patch.setattr(plots, "draw_panel", described)
