"""An export of something else than the run's own backbone does not take its place."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagleray import config
from eagleray.api import export as api
from eagleray.exports import source
from eagleray.exports import write as exporting
from eagleray.runs import recipe
from eagleray.runs.build import build_method


@pytest.mark.parametrize(
    ("to", "what", "step", "place"),
    [
        ("timm", None, None, "export"),
        ("onnx", None, None, "export/onnx"),
        ("timm", "student", None, "export/student"),
        ("timm", None, 100, "export/step-100"),
        ("onnx", "student", 100, "export/onnx-student-step-100"),
    ],
)
def test_each_kind_has_a_place_of_its_own(
    to: str, what: str | None, step: int | None, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def written(found: Any, to: str, folder: Path, **more: Any) -> Any:
        return SimpleNamespace(folder=folder)

    monkeypatch.setattr(source, "load_source", lambda *_: SimpleNamespace(folder=tmp_path, step=step))
    monkeypatch.setattr(exporting, "write", written)
    run = tmp_path / "step-100.pt"
    run.touch()
    assert api.write(run, to=to, what=what).folder == tmp_path / place
    monkeypatch.setenv("HOME", str(tmp_path))
    assert api.write("~/step-100.pt", to=to, what=what).folder == tmp_path / place
    assert api.write(run, tmp_path / "mine", to=to, what=what).folder == tmp_path / "mine"
    there = "export/timm" if place == "export" else place  # directly in export/ are copies of the bucket's files
    assert api.write("s3://bucket/a", to=to, what=what).folder == tmp_path / there


def test_a_copy_of_a_checkpoint_belongs_to_its_run(small: Path, tmp_path: Path):
    made = recipe.load(str(small))
    method = build_method(made)
    method.allocate(10)
    state = {"recipe": json.dumps(config.to_plain(made)), "method": method.state_dict(), "images": 10, "step": 7}
    (tmp_path / "checkpoints").mkdir()
    torch.save(state, tmp_path / "checkpoints" / "best.pt")
    found = source.load_source(str(tmp_path / "checkpoints" / "best.pt"))
    assert (found.out, found.folder, found.step, found.steps) == (str(tmp_path), tmp_path, 7, 7)
