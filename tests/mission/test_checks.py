"""Each check of the mission passes on what is right and fails on the artefact of its planted break."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos.check import Line, Step
from mission import checks
from mission.breaks import drop_tensor, without_last_shard, without_line
from mission.checks import Wrong
from mission.site import Command
from mission.stations import cold_features, indexed, inside


def test_a_lost_step_and_a_doubled_one():
    right = b"".join(json.dumps({"step": n}).encode() + b"\n" for n in range(1, 6))

    def check(data: bytes) -> None:
        checks.each_step_once("steps.jsonl", (json.loads(line)["step"] for line in data.splitlines()), 5)

    check(right)
    with pytest.raises(Wrong, match=r"steps.jsonl: found step 3 0 time\(s\), expected each of 1 to 5 once"):
        check(without_line(right, 3))
    with pytest.raises(Wrong, match="step 5 2 time"):
        check(right + right.splitlines(keepends=True)[-1])


def test_an_index_without_a_shard_or_with_other_pictures(shards: Path):
    tars = {path.name: path.read_bytes() for path in (shards / "train").glob("*.tar")}
    files, index = {n: inside(d) for n, d in tars.items()}, (shards / "train" / "index.parquet").read_bytes()
    right = indexed(index, tars)
    drawn = sum(right.values(), checks.Pictures())
    assert drawn.total() == 320
    assert len(tars) > 1
    checks.whole_index(drawn, files, right)
    with pytest.raises(Wrong, match="shards of the index: found"):
        checks.whole_index(drawn, files, indexed(without_last_shard(index), tars))
    name = min(right)
    (crc, label), *_ = right[name]
    other = right | {name: right[name] - Counter({(crc, label): 1}) + Counter({(crc, label + 1): 1})}
    with pytest.raises(Wrong, match="pictures of the index with another class: found 2, expected 0"):
        checks.whole_index(drawn, files, other)
    with pytest.raises(Wrong, match="pictures that differ from the index: found 1, expected 0"):
        checks.whole_index(drawn, files, right | {name: right[name] - Counter({(crc, label): 1})})


def test_a_command_that_fails_as_with_a_bucket_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    assert Command([sys.executable, "-c", "print(1)"], tmp_path, "right").end() == "1\n"
    with pytest.raises(Wrong, match="found status 75, expected 0: error: no answer"):
        Command(["sh", "-c", "echo error: no answer; exit 75"], tmp_path, "wrong").end()


def test_samples_out_of_the_order_of_the_plan():
    wanted = {1: Step(0, ["a:0", "a:1"], [0, 1])}
    right = [Line("first", 1, 0, rank, [1, 1], [f"a:{rank}"], [rank]) for rank in (0, 1)]
    checks.as_planned(right, wanted, 1)
    with pytest.raises(Wrong, match="samples of the ranks: found step 1, rank 0 of 2, attempt first: other samples"):
        checks.as_planned([Line("first", 1, 0, 0, [1, 1], ["a:1"], [0]), right[1]], wanted, 1)
    with pytest.raises(Wrong, match="expected the order of the plan"):
        checks.as_planned(right[:1], wanted, 1)


def test_a_run_that_nothing_was_killed_of():
    checks.survived([{"ranks": 2}, {"ranks": 2}, {"ranks": 1}])
    with pytest.raises(Wrong, match=r"found \[2\], expected \[2, 2, 1\]"):
        checks.survived([{"ranks": 2}])


def tree() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs of a sweep of two trials, and its trials."""
    trials: list[dict[str, Any]] = [
        {"state": "finished", "values": dict(zip(checks.VARIED, (0.1 * n, 16 * n, 0.9 / n), strict=True))}
        for n in (1, 2)
    ]
    runs: list[dict[str, Any]] = [{"id": "p", "parent": None, "status": "FINISHED", "params": {}, "metrics": {}}]
    for name, trial in zip(("mocov3", "byol"), trials, strict=True):
        params = {"method.name": name} | {k: str(v) for k, v in trial["values"].items()}
        metrics = {"monitor/knn": 9.0}
        runs.append({"id": name, "parent": "p", "status": "FINISHED", "params": params, "metrics": metrics})
    return runs, trials


def test_a_sweep_without_its_tree():
    runs, trials = tree()
    checks.one_tree(runs, trials)
    with pytest.raises(Wrong, match="runs of MLflow without a parent: found 3, expected 1"):
        checks.one_tree([r | {"parent": None} for r in runs], trials)
    with pytest.raises(Wrong, match="children of the sweep in MLflow: found 1, expected 2"):
        checks.one_tree(runs[:-1], trials)
    with pytest.raises(Wrong, match="states of the trials"):
        checks.one_tree([*runs[:-1], runs[-1] | {"status": "RUNNING"}], trials)
    with pytest.raises(Wrong, match="states of the trials"):
        checks.one_tree(runs, [trials[0], trials[1] | {"state": "stopped"}])
    for key, message in (("method.name", "methods of the children"), ("optim.batch", "momentum.value of the children")):
        runs, trials = tree()
        runs[1]["params"][key] = "other"
        with pytest.raises(Wrong, match=message):
            checks.one_tree(runs, trials)


def test_an_evaluation_that_lacks_a_number_or_measured_another_backbone():
    right = [
        {"protocol": p, "untrained": u, "numbers": {f"{p}/top1": 10.0 + u}}
        for p in ("knn", "linear")
        for u in (False, True)
    ]
    checks.evaluated(right, {"knn/top1": 10.0})
    with pytest.raises(Wrong, match="evaluations: found"):
        checks.evaluated(right[1:], {"knn/top1": 10.0})
    with pytest.raises(Wrong, match="found knn/top1 nan, expected a finite number"):
        checks.evaluated([right[0] | {"numbers": {"knn/top1": float("nan")}}, *right[1:]], {"knn/top1": 10.0})
    with pytest.raises(Wrong, match=r"knn/top1 of the trained backbone: found 10.0, expected 12.0"):
        checks.evaluated(right, {"knn/top1": 12.0})


@pytest.mark.slow  # tests/exports/test_write.py has wrong exports, too
def test_an_export_that_timm_refuses_and_other_features(tmp_path: Path):
    import timm
    import torch
    from safetensors.torch import save_file

    options = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 0}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    save_file(model.state_dict(), file := tmp_path / "backbone.safetensors")
    line = f"timm.create_model('vit_tiny_patch16_224', checkpoint_path={str(file)!r}, **{options})"
    pixels = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        expected = model(pixels).tolist()
    checks.same_features(cold_features(line, pixels, tmp_path / "probe.pt"), expected)
    with pytest.raises(Wrong, match="found a difference of"):
        checks.same_features([[x + 0.01 for x in row] for row in expected], expected)
    drop_tensor(file)
    with pytest.raises(Wrong, match=r"timm in a cold process: found .*norm.weight"):
        cold_features(line, pixels, tmp_path / "probe.pt")
