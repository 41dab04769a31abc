"""An evaluation that fails costs its numbers, and never the run."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.runs import arguments, assert_same, split, weights

from eagleray.api.pretrain import pretrain
from eagleray.base import dist
from eagleray.base.files import read_lines
from eagleray.config.plugins import Plugin
from eagleray.engine import checkpoint
from eagleray.protocols import probes
from eagleray.protocols.outcome import Outcome
from eagleray.reports.read import read
from eagleray.reports.sections import findings
from eagleray.runs import evaluations, layout
from eagleray.runs import recipe as recipes
from eagleray.runs.build import build_method

pytestmark = pytest.mark.usefixtures("untracked_runs")
SIZE = "CUDA out of memory. Tried to allocate 2.00 GiB."
KEYS = ("evaluate.every=1", "max_steps=12", "evaluate.probe_epochs=1")


@pytest.mark.slow
def test_evaluations_that_raise_do_not_end_the_run(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, whole = tmp_path / "out", tmp_path / "whole"
    seen = []

    def exhausted(*_: Any, **__: Any) -> Outcome:
        seen.append((checkpoint.manifests(out / "checkpoints")[0], (out / layout.EXPORT).exists()))
        raise torch.OutOfMemoryError(SIZE)

    with monkeypatch.context() as patch:
        patch.setattr(probes, "extract_pooled", exhausted)
        summary = pretrain(*split(arguments(small, shards, out, *KEYS))).summary
    assert seen == [("step-000000010", False), ("step-000000012", True)], "what was saved before"
    assert summary["steps"] == 12
    assert not {key for key in summary if key.startswith(("knn/", "linear/"))}
    assert not any("knn/top1" in record for record in read_lines(out / layout.METRICS))
    said = "its numbers are missing: UserError: cpu: its memory is exhausted during an evaluation"
    found = read_lines(out / layout.HEALTH)
    assert [(f["step"], f["kind"], f["text"][: len(said)]) for f in found] == [
        (step, "failed evaluation", said) for step in (10, 12)
    ]
    assert SIZE in (out / layout.LOG).read_text(), "where it happened"
    table, _ = findings(read(str(out)))
    assert [row[1] for row in table.rows] == ["failed evaluation"] * 2
    pretrain(*split(arguments(small, shards, whole, *KEYS)))
    assert_same(weights(out), weights(whole))  # it was given the same samples as a run whose evaluations succeed


@pytest.mark.slow
def test_an_evaluation_that_kills_its_process_is_given_up(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    out = tmp_path / "out"
    args = split(arguments(small, shards, out, *KEYS))
    monkeypatch.setattr(probes, "extract_pooled", killed)
    for steps in (10, 10, 12, 12):  # the one during training, and then the one at the end
        with pytest.raises(Killed):
            pretrain(*args)
        assert checkpoint.manifests(out / "checkpoints")[0] == f"step-{steps:09d}"
    summary = pretrain(*args).summary
    assert summary["steps"] == 12
    assert "knn/top1" not in summary
    assert [r["step"] for r in read_lines(out / layout.METRICS)] == list(range(1, 13)), "its line has no scores"
    found = read_lines(out / layout.HEALTH)
    assert [f["step"] for f in found] == [10, 12]
    said = f"its numbers are missing: RuntimeError: the process died in it {evaluations.STARTS} times"
    assert {f["text"] for f in found} == {said}
    assert json.loads((out / layout.SUMMARY).read_text()).keys().isdisjoint({"evaluation_starts"})


def test_large_sets_are_cut_and_the_untrained_backbone_is_evaluated_once(
    small: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(evaluations, "ONLINE", (100, 50))
    extract, images = probes.extract_pooled, []

    def counted(backbone: Any, index: Any, samples: Any, **keys: Any) -> Any:
        images.append(len(samples))
        return extract(backbone, index, samples, **keys)

    monkeypatch.setattr(probes, "extract_pooled", counted)
    first = pretrain(*split(arguments(small, shards, tmp_path / "first", *KEYS))).summary
    assert images == [100, 50, 320, 80, 320, 80]
    said = "evaluations during training use 100 of 320 training images and 50 of 80 test images; evaluate.limit=N sets"
    assert said in (tmp_path / "first" / layout.LOG).read_text()
    images.clear()
    other = ["max_steps=1", "evaluate.probe_epochs=1", "optim.lr.value=0.01"]
    second = pretrain(*split(arguments(small, shards, tmp_path / "second", *other))).summary
    assert images == [320, 80]
    for key in "knn/top1_untrained", "linear/top1_untrained":
        assert first[key] == second[key]


@pytest.mark.parametrize("content", [b"\xff{", b'{"knn/top1": ', b"[1]", b'{"knn/top1": null}', None])
def test_a_damaged_score_of_an_untrained_backbone_counts_as_none(
    content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "scores.json"
    assert evaluations.read_baseline(path) == {}
    path.write_text('{"knn/top1": 12.5}')
    assert evaluations.read_baseline(path) == {"knn/top1": 12.5}
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    caplog.set_level("INFO")
    assert evaluations.read_baseline(path) == {}
    [line] = caplog.messages
    assert line.startswith(f"{path}: cannot be read, so the untrained backbone is evaluated again: ")


def test_a_rank_that_cannot_look_for_the_untrained_scores_leaves_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 alone looks."""

    def broken(*_: Any) -> str:
        raise OSError(5, "Input/output error")

    for name in ("build_method", "on_device"):
        monkeypatch.setattr(evaluations, name, lambda *_: SimpleNamespace(export=lambda: None))
    monkeypatch.setattr(evaluations, "baseline_digest", broken)

    def work() -> str:
        run: Any = SimpleNamespace(
            plan=SimpleNamespace(recipe=None), world=SimpleNamespace(rank=dist.rank(), device=None)
        )
        try:
            evaluations.untrained_scores(run, None)  # type: ignore[arg-type]
        except (OSError, RuntimeError) as e:
            return str(e)
        return "nothing"

    assert on_ranks(2, work, tmp_path, start="fork") == [
        "[Errno 5] Input/output error",
        "rank 0: OSError: [Errno 5] Input/output error",
    ]


def test_untrained_scores_belong_to_the_code_of_their_plugins(small: Path):
    made = recipes.load(str(small))
    backbone, images = build_method(made).export(), SimpleNamespace(digests=[])

    def key(*used: Plugin) -> str:
        plan = SimpleNamespace(recipe=replace(made, plugins=used))
        run: Any = SimpleNamespace(plan=plan, world=SimpleNamespace(device=torch.device("cpu")))
        return evaluations.baseline_digest(run, backbone, images)  # type: ignore[arg-type]

    assert len({key(), key(Plugin("net.py", "a" * 64)), key(Plugin("net.py", "b" * 64))}) == 3
