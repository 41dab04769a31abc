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


def test_the_newest_score_is_shown_with_the_lines_after_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"loss": 1.5, "images_per_s": 99.6, "data_wait": 0.1, "bad_samples": 2}
    scores = [{"knn/top1": 30.0}, {"monitor/knn": 12.0}, {}]
    records = [{"step": step, **record, **found} for step, found in enumerate(scores, 1)]
    (tmp_path / layout.LOG).touch()
    (tmp_path / layout.METRICS).touch()
    with FollowRun(tmp_path, 4):
        (tmp_path / layout.METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "bad 2  kNN 30.0 %  kNN monitor 12.0 %" in capsys.readouterr().out
