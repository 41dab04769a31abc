"""An evaluation that raises on one of two ranks of Ray costs its numbers, and the run goes on with the same samples."""

from pathlib import Path

import pytest
from chaos.check import verify
from chaos.job import Run
from chaos.site import RECIPE, SHORT, uninterrupted

from eagleray.base.files import read_lines
from eagleray.runs import layout
from eagleray.runs.health import FAILED_EVALUATION

KEYS = [f"max_steps={SHORT}", "evaluate.every=1", "log_steps=1"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_evaluation_that_raises_on_a_rank(rank: int, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE)
    monkeypatch.setenv("EAGLERAY_UNREADABLE", str(rank))
    with Run(recipe, str(shards / "train"), tmp_path / "run") as run:
        job = run.start(2, 1, *KEYS)
        assert job.finish(400) == 0, job.said()
        monkeypatch.delenv("EAGLERAY_UNREADABLE")
        verify(run.lines(), uninterrupted(run, SHORT, KEYS), SHORT)
        assert len({line.attempt for line in run.lines()}) == 1, "the ranks did not start again"
        found = [f for f in read_lines(run.out / layout.HEALTH) if f["kind"] == FAILED_EVALUATION]
        assert [f["step"] for f in found] == [10, 20, 30, 40, SHORT]
        text = "RuntimeError: no image can be read" if rank == 0 else "RuntimeError: rank 1: RuntimeError: no image"
        assert all(text in f["text"] for f in found)
        assert not any("knn/top1" in line for line in read_lines(run.out / layout.METRICS))
