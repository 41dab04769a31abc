"""A run is followed from its folder."""

import json
from pathlib import Path

import pytest

from eagleray.runs import layout
from eagleray.runs.follow import FollowRun, progress_text


def test_scores_are_shown_where_a_record_has_them():
    record = {"step": 3, "loss": 1.5, "images_per_s": 99.6, "data_wait": 0.1, "bad_samples": 2}
    assert progress_text(record) == "loss 1.500  100 images/s  data wait 10 %  bad 2"
    assert progress_text(record | {"goodput": 0.957}).endswith("  data wait 10 %  goodput 96 %  bad 2")
    assert progress_text(record | {"knn/top1": 30.0}).endswith("  bad 2  kNN 30.0 %")


LOG = "2026-11-21 14:26:01,123 rank0 {} {}\n".format


def test_an_error_that_the_command_prints_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / layout.METRICS).touch()
    (tmp_path / layout.LOG).touch()
    error = RuntimeError("a loader process died: no memory")
    follow = FollowRun(tmp_path, 4, 32)
    follow.__enter__()
    lines = [LOG("ERROR", "a store was away"), LOG("WARNING", "slow")]
    lines += [LOG("ERROR", "the run failed: RuntimeError: a peer died"), LOG("INFO", "started again")]
    lines += [LOG("ERROR", f"the run failed: RuntimeError: {error}"), "Traceback\n", LOG("INFO", "waiting")]
    (tmp_path / layout.LOG).write_text("".join(lines))
    follow.__exit__(RuntimeError, error, None)
    assert capsys.readouterr().out.splitlines() == [
        "warning: slow",
        "error: a store was away",
        "started again",
        "warning: an earlier attempt failed: RuntimeError: a peer died",
        "waiting",
    ]


def test_an_error_after_which_the_command_goes_on_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / layout.METRICS).touch()
    (tmp_path / layout.LOG).write_text("")
    with FollowRun(tmp_path, 4, 32):
        (tmp_path / layout.LOG).write_text(LOG("ERROR", "the run failed: RuntimeError: cut") + LOG("INFO", "again"))
    told = capsys.readouterr().out
    assert "warning: an earlier attempt failed: RuntimeError: cut" in told
    assert "the run failed" not in told, "it was stopped"


def test_the_newest_score_is_shown_with_the_lines_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"loss": 1.5, "images_per_s": 99.6, "data_wait": 0.1, "bad_samples": 2}
    scores = [{"knn/top1": 30.0}, {"monitor/knn": 12.0}, {}]
    records = [{"step": step, **record, **found} for step, found in enumerate(scores, 1)]
    (tmp_path / layout.LOG).touch()
    (tmp_path / layout.METRICS).touch()
    with FollowRun(tmp_path, 4, 32):
        (tmp_path / layout.METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "bad 2  kNN 30.0 %  kNN monitor 12.0 %" in capsys.readouterr().out


def test_the_time_left_is_that_of_the_steps_at_their_own_pace(tmp_path: Path) -> None:
    """Whatever the start took."""
    follow = FollowRun(tmp_path, 100, 32)
    assert follow.seconds_left(0) == 0, "nothing is known"
    follow.pace.extend([16.0, 64.0, 0.0])  # 2 s and half a second for a step, and a line that has no pace
    assert follow.seconds_left(20) == 80 * 1.25
    follow.pace.extend([32.0] * 20)
    assert follow.seconds_left(99) == 1.0
