"""What a run has open is closed at its end, whatever fails on the way."""

import logging
from functools import partial
from pathlib import Path

import pytest
from helpers.processes import free_port

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.runs import layout, recipe
from eagleray.runs.attempts import Attempts
from eagleray.runs.run_dir import LogFile, RunDir
from eagleray.runs.run_store import run_store
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
        assert run_store(out).is_claimed()
    assert not run_store(out).is_claimed()
    assert logging.getLogger("eagleray").handlers == handlers


def test_a_full_disk_is_said_before_that_mlflow_is_away(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A server on the same disk stops to answer, too, which is not why the run ends."""
    out = tmp_path / "run"
    tracking = Tracking(f"http://127.0.0.1:{free_port()}")
    run = RunDir(recipe.load(str(small), [f"out={out}"]), 0, tracking, command="c")
    run.__enter__()
    run.begin(0, 1, lengths=None)
    full = OSError(28, "No space left on device", "x.pt")
    with pytest.raises(UserError, match=r"cannot be written: x\.pt: No space left on device; the same command"):
        run.__exit__(OSError, full, None)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said[0] == "ends: x.pt: No space left on device"
    assert any(line.startswith("MLflow at ") for line in said[1:])
    assert said[0] in (out / layout.LOG).read_text()


def test_the_log_of_a_run_says_in_one_line_what_failed(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    out = tmp_path / "run"
    run = RunDir(recipe.load(str(small), [f"out={out}"]), 0, Tracking("file:" + str(tmp_path / "mlruns")), command="c")
    with pytest.raises(RuntimeError), run:
        raise RuntimeError("connection reset\nby a peer")
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert said == ["the run failed: RuntimeError: connection reset by a peer"]
    assert "Traceback" in (out / layout.LOG).read_text(), "with where it failed"


def test_a_run_that_ends_before_its_first_checkpoint_does_not_miss_it(small: Path, tmp_path: Path):
    out = tmp_path / "run"
    run = RunDir(recipe.load(str(small), [f"out={out}"]), 0, Tracking("file:" + str(tmp_path / "mlruns")), command="c")
    run.__enter__()
    run.begin(0, 1, lengths=None)
    run.__exit__(RuntimeError, RuntimeError("no memory"), None)
    said = [line for line in (out / layout.LOG).read_text().splitlines() if " ERROR " in line or " WARNING " in line]
    assert "the run failed: RuntimeError: no memory" in said[0]
    assert not [line for line in said if layout.PLACES in line]


def test_a_run_that_has_ended_is_known_to_workers_that_ray_starts_afterwards(small: Path, tmp_path: Path):
    made = recipe.load(str(small), [f"out={tmp_path / 'run'}"])
    with RunDir(made, 0, Tracking("none"), command="c") as run:
        (run.path / layout.SUMMARY).write_text('{"steps": 12}')
        (run.path / layout.STARTS).write_text('{"step": 0, "time": 1}\n')
        assert run.ended(12) is None, "MLflow may lack its numbers"
        (run.path / layout.STARTS).write_text('{"step": 0, "time": 1}\n{"ended": true, "time": 2}\n')
        assert run.ended(12) == {"steps": 12}
        assert run.ended(13) is None


def test_deaths_in_an_evaluation_count_for_its_step_alone(small: Path, tmp_path: Path):
    made = recipe.load(str(small), [f"out={tmp_path / 'run'}"])
    with RunDir(made, 0, Tracking("none"), command="c") as run:
        for steps, starts in (10, 1), (10, 2), (20, 1), (20, 2):
            assert run.begin_evaluation({"steps": steps}) == starts


def test_a_change_of_the_number_of_ranks_is_no_death_in_an_evaluation(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = recipe.load(str(small), [f"out={tmp_path / 'run'}"])
    with RunDir(made, 0, Tracking("none"), command="c") as run:
        run.starts = Attempts(run.path / layout.STARTS)
        for ranks, starts in (2, 1), (3, 1), (3, 2), (4, 1):
            monkeypatch.setattr(dist, "size", partial(int, ranks))
            run.starts.add(step=10, ranks=ranks)
            assert (run.begin_online(10), run.begin_evaluation({"steps": 10})) == (starts, starts)
