"""A backbone that timm cannot build is exported where our package is not installed and neither rich nor Ray is."""

from pathlib import Path

import pytest
from helpers.benchmarks import LACKS

from eagleray.base import child
from eagleray.engine import export
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network


def test_an_export_is_checked_on_a_machine_that_has_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text(LACKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(export, "run_check", lambda words: child.run_python(export.CHECK, words, text=True))
    file = export.to_timm(Backbone(name="resnet18_32"), Network(name="resnet18_32"), tmp_path / "export")
    assert export.read_export(file).network.name == "resnet18_32"
