"""Training with weights that are divided among ranks is training with whole weights."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from helpers.ranks import Run, train
from helpers.recipes import small_recipe
from helpers.runs import arguments, weights

from eagleray.api.pretrain import pretrain
from eagleray.base.dist import own_rows
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.engine import checkpoint
from eagleray.engine.sharded import replace, tensors
from eagleray.engine.sharded_checkpoint import fill

BOUND = 1e-7  # in float64; AdamW moves weights by about 5e-4 a step
KEYS = ["evaluate.probe_epochs=0", "optim.epochs=3", "monitor.every=4", "checkpoint.steps=10", "checkpoint.keep=2"]
TEACHERS = ("dino", "ibot")
EXPORTED = {"mocov3": "base_encoder.backbone"} | dict.fromkeys(TEACHERS, "teacher.backbone")
METHODS = {"mocov3": ["optim.clip=1.0"]} | {name: ["optim.clip=1.0", "optim.clip_each=true"] for name in TEACHERS}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", METHODS)
def test_sharded_ranks_are_whole_ones(method: str, shards: Path, tmp_path: Path):
    """Twenty steps on two ranks, continued on one and on four, and between both kinds."""
    (recipe := tmp_path / f"{method}.yaml").write_text(small_recipe(method))
    keys = [*arguments(recipe, shards, tmp_path, *KEYS, *METHODS[method])[1:], "max_steps=20"]
    whole, split = tmp_path / "ddp", tmp_path / "fsdp"
    later = [Run(n, tmp_path / f"on-{n}", [*keys, "parallel=fsdp"], (split, 10)) for n in (1, 4)]
    later += [Run(2, tmp_path / "to-ddp", keys, (split, 10))]
    later += [Run(2, tmp_path / "from-ddp", [*keys, "parallel=fsdp"], (whole, 10))]
    train(recipe, [Run(2, whole, keys), Run(2, split, [*keys, "parallel=fsdp"]), *later])

    want, got = weights(whole), weights(split)
    assert largest_difference(want, got) < BOUND
    for run in later:
        assert largest_difference(want, weights(run.out)) < BOUND, run.out.name
        assert [r["step"] for r in read_lines(run.out / "metrics.jsonl")] == list(range(1, 21)), run.out.name
    for name in ("loss", "health/growth", "health/update", "health/ema_distance"):
        assert values(whole, name), name
        assert values(whole, name) == pytest.approx(values(split, name), rel=1e-5), name

    folder = split / "checkpoints"
    assert checkpoint.manifests(folder) == ["step-000000020", "step-000000010"]
    manifest = json.loads((folder / "step-000000020.json").read_text())
    assert manifest["shards"].keys() == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    sizes = [part["bytes"] for name, part in manifest["shards"].items() if name.startswith("__")]
    assert max(sizes) < 1.3 * min(sizes), "a half on each rank"

    file = split / "export" / "backbone.safetensors"
    options = json.loads(file.with_suffix(".json").read_text())
    model = timm.create_model(options["timm"], num_classes=0, checkpoint_path=str(file), **options["options"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, got[f"{EXPORTED[method]}.model.{name}"].float()), name

    (folder / "step-000000030.shards").mkdir()  # unfinished: it has no manifest
    damaged = folder / "step-000000020.shards" / "__1_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert not checkpoint.intact(folder / "step-000000020.pt")
    state = checkpoint.newest(folder)
    assert state is not None
    assert state["step"] == 10


@pytest.mark.slow
def test_a_backbone_with_batch_norm_is_divided(shards: Path, tmp_path: Path):
    (recipe := tmp_path / "mocov3.yaml").write_text(small_recipe("mocov3"))
    keys = [*arguments(recipe, shards, tmp_path, *KEYS, "backbone.norm=batch")[1:], "max_steps=3"]
    outs = {parallel: tmp_path / parallel for parallel in ("ddp", "fsdp")}
    train(recipe, [Run(2, out, [*keys, f"parallel={parallel}"]) for parallel, out in outs.items()])
    assert largest_difference(weights(outs["ddp"]), weights(outs["fsdp"])) < BOUND


def values(out: Path, name: str) -> list[float]:
    return [record[name] for record in read_lines(out / "metrics.jsonl") if name in record]


@pytest.mark.parametrize("method", ["swav", "instdisc", "supervised"])
def test_a_method_that_is_not_tested_is_refused(method: str, shards: Path, tmp_path: Path):
    (recipe := tmp_path / "small.yaml").write_text(small_recipe(method))
    said = f"parallel=fsdp: expected a method that is tested with it, got method.name={method}; use ddp"
    with pytest.raises(UserError, match=re.escape(said)):
        pretrain(recipe, arguments(recipe, shards, tmp_path / "out", "parallel=fsdp")[1:])


@pytest.mark.parametrize("key", ["optim.micro_batch=auto", "optim.reduce=bf16", "compile=true"])
def test_what_needs_whole_weights_is_refused(key: str, shards: Path, tmp_path: Path):
    (recipe := tmp_path / "small.yaml").write_text(small_recipe("mocov3"))
    with pytest.raises(UserError, match=re.escape(f"parallel=fsdp: does not work with {key};")):
        pretrain(recipe, arguments(recipe, shards, tmp_path / "out", "parallel=fsdp", key)[1:])


def test_the_rows_of_ranks_are_all_rows():
    for rows in (1, 2, 5, 8):
        x = torch.randn(rows, 3)
        assert torch.equal(torch.cat([own_rows(x, rank, 4) for rank in range(4)]), x)


def test_a_state_without_sharded_tensors_is_read_as_it_is(tmp_path: Path):
    state = {"a": {"b": torch.ones(2)}, "c": [torch.zeros(3)], "d": 1}
    assert fill(state, tmp_path / "there is no such folder") is state
    assert [path for path, _ in tensors(state)] == [("a", "b"), ("c", 0)]
    changed = replace(state, ("a", "b"), torch.zeros(2))
    assert torch.equal(changed["a"]["b"], torch.zeros(2))
    assert torch.equal(state["a"]["b"], torch.ones(2))
