"""What a run has open is closed at its end, whatever fails on the way."""

import logging
from pathlib import Path

import pytest

from eagleray.base import files
from eagleray.runs import recipe
from eagleray.runs.run_dir import LogFile, RunDir
from eagleray.runs.stop_signal import StopSignal
from eagleray.runs.tracking import Tracking


@pytest.mark.parametrize("first", [LogFile, StopSignal])
def test_what_cannot_be_closed_does_not_keep_the_rest_open(
    first: type, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(self: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(first, "close", fail)
    out = tmp_path / "run"
    handlers = list(logging.getLogger("eagleray").handlers)
    run = RunDir(recipe.load(str(small), [f"out={out}"]), 0, Tracking("file:" + str(tmp_path / "mlruns")), command="c")
    with run:
        assert files.is_folder_locked(out)
    assert not files.is_folder_locked(out)
    assert logging.getLogger("eagleray").handlers == handlers
