"""Every benchmark runs with tiny sizes, prints what it promises, and needs no cluster, no tracker and no cloud."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.benchmarks import ABSENT, BENCHMARKS, LACKS, ROOT, Bare, load_benchmark
from helpers.recipes import METHODS
from PIL import Image

from eagleray.cli.demo import pictures
from eagleray.datasets.shards import Sample, encode, write_shards

TINY = "backbone.options={img_size: 16, patch_size: 8, embed_dim: 24, depth: 2, num_heads: 3}"
RESUME = ("--images", "400", "--batch", "4", "--lanes", "4", "--rounds", "1")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    machine = Bare(tmp_path_factory.mktemp("bare"))
    yield machine
    machine.close()


def run(where: Bare | dict[str, str], *command: str | Path, rc: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a benchmark on a bare machine, or here with an environment."""
    if isinstance(where, Bare):
        done = where.run(*command)
    else:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=where, capture_output=True, text=True)
    assert done.returncode == rc, done.stderr
    return done


def result(where: Bare | dict[str, str], script: str, *arguments: str | Path) -> dict[str, Any]:
    out = json.loads(run(where, BENCHMARKS / script, *arguments, "--json").stdout.splitlines()[-1])
    assert {"cpu", "cores", "gpu", "torch", "commit"} <= out["machine"].keys()
    return out


@pytest.fixture
def photographs(tmp_path: Path, bare: Bare) -> Path:
    """Shards of 48 images of 64 x 48 pixels."""
    folder = tmp_path / "photographs"
    run(bare, BENCHMARKS / "synthetic.py", folder, "--images", "48", "--width", "64", "--height", "48")
    return folder


def test_the_bare_machine_is_bare(bare: Bare) -> None:
    for name in (*ABSENT, "eagleray.config"):  # an editable install leaves an empty `eagleray` with its recipes
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], env=bare.environment, capture_output=True, text=True
        )
        assert f"No module named {name!r}" in done.stderr


@pytest.mark.slow
def test_loader(bare: Bare, photographs: Path) -> None:
    out = result(bare, "loader.py", "--data", photographs, "--images", "4", "--rounds", "1")
    parts = ("decode", "crop", "ours", "photometric_cpu", "official", "official_cpu_part")
    assert all(out[f"{part}_per_core"] > 0 and out[f"{part}_images_per_s"] > 0 for part in parts)
    assert out["photometric_images_per_s"] > 0
    assert out["photometric_device"] == "cpu"
    ratios = {"ratio_per_core": "official_per_core", "ratio_decode_crop": "official_cpu_part_per_core"}
    for ratio, other in ratios.items():
        assert out[ratio] == pytest.approx(out["ours_per_core"] / out[other], rel=1e-2)
    assert 0 < out["ratio_all_on_cpu"] < out["ratio_per_core"]


@pytest.mark.parametrize(
    ("recipe", "views", "small", "real"),
    [
        ("mocov3_vits16", "views=[{size: 16, count: 2}]", ["method.hidden=16"], False),
        ("dino_vits16", "views=[{size: 16, count: 2}, {size: 8}]", ["method.hidden=16", "method.prototypes=32"], True),
    ],
)
@pytest.mark.slow
def test_step(bare: Bare, photographs: Path, recipe: str, views: str, small: list[str], real: bool) -> None:
    path = BENCHMARKS / "recipes" / f"{recipe}.yaml"
    source = [f"data.train={photographs}", "data.workers=2"] if real else ["--synthetic"]
    sizes = ["--steps", "3", "--warmup", "1", "--batch", "8"]
    out = result(bare, "step.py", path, TINY, views, *small, *source, *sizes)
    parts = [out[f"{part}_ms"] for part in ("forward", "backward", "clip", "optimizer", "ema", "rest")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(out["step_ms"], rel=1e-2)
    assert out["images_per_s"] == pytest.approx(8000 / out["step_ms"], rel=1e-2)
    assert 0 < out["data_wait"] < 1
    assert out["peak_memory_mib"] > out["planned_memory_mib"] > 0  # the process holds its program, too
    assert out["tflops"] > 0
    assert (out["input"], out["batch"], out["steps"], out["device"]) == ("data" if real else "synthetic", 8, 3, "cpu")


def test_step_names_the_wrong_key(bare: Bare) -> None:
    path = BENCHMARKS / "recipes" / "mocov3_vits16.yaml"
    done = run(bare, BENCHMARKS / "step.py", path, "optim.epoch=1", "--synthetic", rc=2)
    assert done.stderr.startswith("error: ")
    assert "did you mean 'optim.epochs'" in done.stderr


@pytest.mark.slow
def test_backbones(bare: Bare) -> None:
    out = result(bare, "backbones.py", "deit_s", "pvt_s", "--batch", "1", "--rounds", "1")
    assert out["deit_s"]["gmacs"] == pytest.approx(4.6, abs=0.01)
    assert out["pvt_s"]["params_m"] == pytest.approx(23.97)
    assert out["pvt_s"]["images_per_s"] > 0
    assert out["pvt_s"]["published_speed"] == pytest.approx(851 / 1007, rel=1e-3)


@pytest.mark.slow
def test_drloc_cost(bare: Bare) -> None:
    small = ("--backbone", "toy", "--size", "16", "--batch", "4", "--rounds", "2")
    out = result(bare, "drloc_cost.py", *small)
    assert all(out[f"{what}_{of}"] > 0 for what in ("seconds", "memory") for of in ("supervised", "drloc"))
    assert out["memory_ratio"] == pytest.approx(out["memory_drloc"] / out["memory_supervised"], rel=1e-2)
    assert out["cpu_ratio"] > 1
    assert out["seconds_ratio"] > 0


@pytest.mark.slow
def test_resume(bare: Bare) -> None:
    out = result(bare, "resume.py", *RESUME, "--workers", "2")
    assert all(out[f"first_batch_s_{place}"] > 0 for place in (0, 50, 99))
    assert out["ratio_99_over_0"] == pytest.approx(out["first_batch_s_99"] / out["first_batch_s_0"], rel=1e-2)
    assert out["steps_per_epoch"] == 100


def test_without_json_there_is_a_table(bare: Bare) -> None:
    done = run(bare, BENCHMARKS / "resume.py", *RESUME)
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:4] == ["first_batch_s_0", "first_batch_s_50", "first_batch_s_99", "ratio_99_over_0"]
    assert names[-1] == "machine"


@pytest.mark.slow
def test_photometric(bare: Bare) -> None:
    out = result(bare, "photometric.py", "--images", "2", "--rounds", "1")
    names = ("plain", "flip", "jitter", "gray", "blur", "solarize", "first", "second", "small")
    assert all(out[f"{name}_images_per_s"] > 0 for name in names)


def test_decode(bare: Bare) -> None:
    out = result(bare, "decode.py", "--megapixels", "0.1", "1", "--images", "1", "--rounds", "1")
    assert set(out["speedup"]) == {"0.1 MP dino", "0.1 MP mocov3", "1 MP dino", "1 MP mocov3"}
    assert out["difference"]["0.1 MP dino"] == {"mean": 0, "largest": 0}  # nothing to reduce
    assert 0 < out["difference"]["1 MP dino"]["mean"] < 10


def test_crops(bare: Bare) -> None:
    out = result(bare, "crops.py", "--images", "2", "--rounds", "1")  # it fails where a pixel differs
    assert all(out[f"{name}_per_core"] > 0 for name in ("decode", "torchvision_decode", "cpu_dino", "sent_mocov3"))
    assert out["device_dino_per_s"] > 0
    assert 0 < out["sent_mocov3_bytes"] <= 3 * out["cpu_mocov3_bytes"]


def test_gpu_script_is_bash() -> None:
    subprocess.run(["bash", "-n", BENCHMARKS / "gpu.sh"], check=True)


def test_gpu_tests_need_no_package_that_is_missing_there(bare: Bare, tmp_path: Path) -> None:
    paths = [str(ROOT / "tests"), str(ROOT / "platform")]
    (tmp_path / "script.py").write_text(f"import sys; sys.path[:0] = {paths}; import conftest")
    run(bare, tmp_path / "script.py")


def test_gpu_script_names_what_is_missing(bare: Bare, tmp_path: Path) -> None:
    """The bare machine of these tests lacks one package more."""
    (tmp_path / "sitecustomize.py").write_text(LACKS.replace("('ray'", "('platformdirs', 'ray'"))
    given = bare.environment | {"PYTHONPATH": str(tmp_path), "OUT": str(tmp_path / "results"), "PYTHON": sys.executable}
    done = subprocess.run(["bash", BENCHMARKS / "gpu.sh", "--cpu"], env=given, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("pytest; missing: platformdirs\n")


@pytest.mark.slow
def test_gpu_script_on_a_cpu(bare: Bare, tmp_path: Path) -> None:
    given = bare.environment | {"OUT": str(tmp_path / "results"), "PYTHON": sys.executable}
    done = subprocess.run(["bash", BENCHMARKS / "gpu.sh", "--cpu"], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results" / "gpu.jsonl").read_text().splitlines()]
    steps = {f"{method}{data}" for method in ("mocov3", "dino", "simclr") for data in ("", "-real")}
    steps |= {f"{method}{how}" for method in ("esvit", "selfpatch", "drloc") for how in ("", "-compiled")}
    others = {"methods", "methods-half", "tests", "photometric", "loader", "crops", "prototypes", "windows"}
    assert {line["name"] for line in lines} == steps | others
    assert {line["status"] for line in lines} == {"ok"}, lines
    assert not [line for line in lines if "error" in line["result"]]
    assert [line["result"]["case"] for line in lines if line["name"] == "mocov3"] == [
        "vits16",
        "vits16-bf16",
        "vits16-fp32",
        "vitb16",
    ]
    assert all(name in done.stdout for name in steps)
    assert "methods: 2 of 2 passed" in done.stdout


@pytest.mark.slow
def test_a_case_that_fails_leaves_the_others(bare: Bare) -> None:
    path = BENCHMARKS / "recipes" / "mocov3_vits16.yaml"
    small = [TINY, "views=[{size: 16, count: 2}]", "method.hidden=16", "--synthetic", "--steps", "1", "--warmup", "1"]
    cases = ["--case", "wrong method.hidden=0", "--case", "right optim.batch=4 data.lanes=4"]
    done = run(bare, BENCHMARKS / "step.py", path, *small, *cases, "--json")
    wrong, right = map(json.loads, done.stdout.splitlines())
    assert wrong["case"] == "wrong"
    assert "method.hidden" in wrong["error"]
    assert (right["case"], right["batch"]) == ("right", 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_methods(bare: Bare, ranks: str) -> None:
    out = result(bare, "methods.py", "--methods", "mocov3", "--ranks", ranks)
    assert out["methods"]["mocov3"]["status"] == "ok"
    assert 0 <= out["methods"]["mocov3"]["knn"] <= 100


@pytest.mark.slow
def test_methods_names_the_error_of_each(bare: Bare) -> None:
    done = run(bare, BENCHMARKS / "methods.py", "--methods", "mocov3", "--json", "optim.batch=5", rc=1)
    assert "optim.batch" in json.loads(done.stdout.splitlines()[-1])["methods"]["mocov3"]["status"]


@pytest.mark.slow
def test_big_index(bare: Bare) -> None:
    out = result(bare, "big_index.py", "--images", "8192", "--shards", "4", "--lanes", "8", "--batch", "64")
    assert all(out[name] > 0 for name in ("open_s", "open_rss_mib", "resume_s", "reader_rss_mib", "index_mib"))
    assert out["select_s"] > 0


@pytest.mark.slow
def test_evaluate_scale(bare: Bare, photographs: Path) -> None:
    sizes = ["--images", "900", "--queries", "300", "--dim", "16", "--classes", "5", "--ranks", "1", "2"]
    out = result(bare, "evaluate_scale.py", *sizes, "--photographs", "8", "--rounds", "1", "--data", photographs)
    assert out["overhead_mb"].keys() == out["law_mb"].keys() == {"1", "2"}
    assert out["same_top1"] is True
    assert out["rate_of_loader"] > 0
    assert "imagenet-22k on 64" in out["extrapolated"]


@pytest.mark.slow
def test_embed(photographs: Path) -> None:
    out = result(dict(os.environ), "embed.py", "--data", photographs, "--size", "16", "--dim", "6", "--rounds", "1")
    assert out["images"] == 48
    assert 0.01 < out["rate_of_loader"] < 100
    assert out["rate_of_loader"] == pytest.approx(
        out["images_per_s"]["embed"] / out["images_per_s"]["loader"], rel=0.02
    )


@pytest.mark.slow
def test_loader_memory(bare: Bare, tmp_path: Path) -> None:
    figure = tmp_path / "memory.png"
    out = result(bare, "loader_memory.py", "--images", "64", "--batch", "8", "--figure", figure)
    assert 0 < out["peak_pss_mib"] < out["peak_rss_mib"] < out["bound_mib"]
    assert figure.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rival"),
    [(["streaming.py"], "mosaicml-streaming==0.13.0"), (["decode.py", "--dali"], "nvidia-dali-cuda120==2.4.0")],
)
def test_a_rival_that_cannot_be_installed_is_one_line(
    command: list[str], rival: str, bare: Bare, tmp_path: Path
) -> None:
    alone = bare.environment | {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1"}
    done = run(alone, BENCHMARKS / command[0], *command[1:], rc=2)
    installing, error = done.stderr.strip().splitlines()
    assert installing.startswith(f"installing {rival}")
    assert error.startswith(f"error: {rival} cannot be installed: ERROR: ")


@pytest.mark.slow
def test_checkpoint_stall(bare: Bare, tmp_path: Path) -> None:
    small = ("--batch", "4", "--saves", "1", "--every", "0.1", "--place", tmp_path / "checkpoints")
    out = result(bare, "checkpoint_stall.py", TINY, "method.hidden=16", "method.dim=8", *small)
    assert all(out[name] > 0 for name in ("blocked_ms", "step_ms", "step_saving_ms", "save_s", "mib", "stall"))
    assert list((tmp_path / "checkpoints").glob("step-*.json"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_survive(shards: Path) -> None:
    """On a real Ray, unlike the others."""
    keys = ("--train", str(shards / "train"), "--every", "30", "--minutes", "0.6", "--batch", "32", "--interval", "5")
    out = result(dict(os.environ), "survive.py", *keys)
    assert out["kills"] == 1
    assert out["same_weights"]
    assert out["steps_repeated"] <= out["kills"] * (out["interval"] + 2)
    assert out["restarts"] == out["kills"] + 1  # and the start that only ends it
    assert out["seconds_lost"] > 0
    assert all(0 < out[name] < 1 for name in ("goodput", "goodput_unharmed"))  # which of them is larger is noise here


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_head_memory() -> None:
    """On a real Ray, too."""
    out = result(dict(os.environ), "head_memory.py", "--runs", "1")
    assert 0 < out["pss"]["0"] < out["pss"]["1"] < out["rss"]["1"]
    assert {"driver x1", "JobSupervisor x1", "TrainController x1"} <= out["rss_of_processes"].keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_ranks() -> None:
    """On a real Ray and a real store."""
    out = result(dict(os.environ), "many_ranks.py", "--ranks", "2", "--minutes", "0.5")
    assert out["pss_mib"].keys() == {"eagleray-rank", "eagleray-spare", "ray::RayTrainWorker", "others"}
    assert 0 < out["pss_mib_per_rank"] < sum(out["pss_mib"].values())
    assert 0 < out["requests_per_minute"] < 300


@pytest.mark.slow
def test_evidence(tmp_path: Path) -> None:
    for seed, name in enumerate(("train", "test")):
        write_shards(pictures(seed, 80), str(tmp_path / name))
        [shard] = (tmp_path / name).glob("*.tar")
        shard.rename(tmp_path / f"{name}-000000.tar")
    keys = ("--data", tmp_path, "--work", tmp_path / "work", "--images", "128", "--epochs", "1", "--settings", "mocov3")
    out = result(dict(os.environ), "evidence.py", *keys)
    assert [(row["data"], row["setting"]) for row in out["rows"]] == [
        (data, setting) for data in ("cifar10", "shapes") for setting in ("untrained", "mocov3")
    ]
    assert all(-1 <= found["within"] <= 1 and 0 <= found["sides"] <= 1 for found in out["correlations"].values())


def test_plain_step_is_the_same_step(bare: Bare) -> None:
    out = result(bare, "plain_step.py", "--batch", "2", "--rounds", "1")
    assert out["difference"] < 1e-5
    assert out["step"] > 0


def test_a_ratio_that_falls_is_named() -> None:
    ratios = load_benchmark("ratios.py")
    known = {"step": 1.0, "share_of_raw": 0.97}
    assert ratios["below"]({"step": 0.91, "share_of_raw": 0.88, "new": 0.1}, known) == []
    [line] = ratios["below"]({"step": 0.89, "share_of_raw": 1.2}, known)
    assert line == "step: found 0.89, expected at least 0.9 of 1"


def test_the_best_ratio_is_of_the_same_cpu(tmp_path: Path) -> None:
    ratios = load_benchmark("ratios.py")
    lines = [("A", {"step": 1.0}), ("A", {"step": 0.9, "share_of_raw": 0.5}), ("B", {"step": 2.0})]
    record = tmp_path / "ratios.jsonl"
    record.write_text("".join(json.dumps(values | {"machine": {"cpu": cpu}}) + "\n" for cpu, values in lines))
    with mock.patch.dict(ratios["best"].__globals__, RECORD=record):
        assert ratios["best"]("A") == {"step": 1.0, "share_of_raw": 0.5}
        assert ratios["best"]("C") == {}


@pytest.mark.slow
def test_plan(bare: Bare) -> None:
    small = ("method.hidden=16", "views=[{size: 16, count: 2}]", TINY)
    out = result(bare, "plan.py", "--only", "vit_xs", "--keys", *small)
    for row in (out["vit_xs"], out["vit_xs_checkpointing"], out["vit_xs_micro_batch"]):
        assert abs(row["memory_error"]) < 0.1
        assert row["seconds_predicted"] > 0
    assert out["worst_memory"] < 0.1


def test_dispatch_counts_a_step_that_never_waits(bare: Bare) -> None:
    lines = run(bare, BENCHMARKS / "dispatch.py", "--methods", "mocov3", "--json").stdout.splitlines()
    [(name, counted)] = json.loads(lines[-1])["methods"].items()
    assert (name, counted["waits"]) == ("mocov3", 0)
    assert 1000 < counted["operations"] < 2280  # 3,257 before views shared a forward
    assert counted["planned"] == counted["kernels"] < counted["operations"]


@pytest.mark.slow
def test_a_plan_has_the_operations_of_deep_networks_whose_images_are_mixed(bare: Bare) -> None:
    lines = run(bare, BENCHMARKS / "dispatch.py", "--methods", "supervised", "drloc", "--json").stdout.splitlines()
    for row in json.loads(lines[-1])["methods"].values():
        assert row["planned"] == row["kernels"]


def test_dispatch_leaves_no_method_out() -> None:
    text = (BENCHMARKS / "dispatch.py").read_text()
    assert [name for name in METHODS if f'    "{name}": "' not in text] == []


@pytest.mark.slow
def test_peers_measures_ours_beside_an_installed_rival(bare: Bare, tmp_path: Path) -> None:
    """A script takes the place of the rival: it answers every request with a second."""
    same = "-".join(f"{name}-{version(name).partition('+')[0]}" for name in ("torch", "torchvision", "timm"))
    folder = tmp_path / "eagleray" / "peers" / f"lightly-train-0.18.0-{same}"
    (folder / "bin").mkdir(parents=True)
    (folder / "complete").touch()
    python = folder / "bin" / "python"
    python.write_text("""#!/bin/sh\nwhile read line; do echo '{"wall": 1, "cpu": 1}'; done\n""")
    python.chmod(0o755)
    sizes = ("--images", "8", "--batch", "4", "--rounds", "1", "--only", "input_two_view", "input_multi_crop")
    out = result(bare.environment | {"XDG_CACHE_HOME": str(tmp_path)}, "peers.py", *sizes)
    for key in ("input_two_view", "input_multi_crop"):
        assert out[key] == pytest.approx(out[f"{key}_per_s"] / 4, rel=1e-2)
        assert out[f"{key}_theirs_per_s"] == 4
    assert 0.4 < out["view_difference"] < 0.51


@pytest.mark.slow
def test_peers_says_in_a_line_that_its_rival_cannot_be_had(bare: Bare, tmp_path: Path) -> None:
    offline = {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""}
    done = run(bare.environment | offline, BENCHMARKS / "peers.py", rc=2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: lightly-train==0.18.0 cannot be installed: ERROR: No matching")


@pytest.mark.slow
def test_continued(shards: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "transfer" / "mnist").mkdir(parents=True)
    for file in shards.glob("*/*.tar"):
        (folder / file.name.replace("shard", file.parent.name)).symlink_to(file)
    runs = tmp_path / "runs"
    sizes = ("--seeds", "1", "--steps", "4", "--only", "mnist-defaults", "mnist-adapters")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out = result(environment, "continued.py", "--data", tmp_path, "--out", runs, *sizes)
    assert sorted(folder.name for folder in runs.glob("*-0")) == ["mnist-adapters-0", "mnist-defaults-0"]
    summary = json.loads((runs / "mnist-adapters-0" / "summary.json").read_text())
    assert out["mnist_adapters_knn_start"] == pytest.approx(summary["knn/top1_start"], rel=1e-2)
    assert out["mnist_adapters_exported"] == [summary["exported_step"]]
    assert out["mnist_defaults_exported"] == [4]


@pytest.mark.slow
def test_curation(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for split, count in {"train": 700, "test": 60}.items():  # squares of 4 pixels, unlike each other
        squares = (draw.integers(0, 256, (8, 8, 3), np.uint8).repeat(4, 0).repeat(4, 1) for _ in range(count))
        samples = [Sample(f"{i:03d}", "png", encode(Image.fromarray(x)), i % 10) for i, x in enumerate(squares)]
        write_shards(samples, str(tmp_path / split))
        [shard] = (tmp_path / split).glob("*.tar")
        (tmp_path / "cifar10").mkdir(exist_ok=True)
        shard.rename(tmp_path / "cifar10" / f"{split}-000000.tar")
    sizes = ("--seeds", "1", "--steps", "2", "--similar", "0.9999", "--bits", "2")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    out = result(environment, "curation.py", "--data", tmp_path, "--out", tmp_path / "out", *sizes)
    assert out["images"] > 700
    assert out["exact_recall"] > 0.9, "features of copies are equal"
    assert all(0 <= out[f"{name}_precision"] <= 1 for name in ("copy", "dark", "blurred", "tiny"))
    runs = {
        arm: json.loads((tmp_path / "out" / f"{arm}-0" / "summary.json").read_text()) for arm in ("all", "balanced")
    }
    assert {r["images"] for r in runs.values()} == {256}
    assert 0 < out["all_knn"] <= 100


@pytest.mark.slow
def test_control_cost() -> None:
    out = result(dict(os.environ), "control_cost.py", "--ranks", "2", "4", "--seconds", "1", "--history", "0.1")
    assert out["messages_per_step"] == {"2": 1, "4": 1}
    assert all(0 <= uploaded < 60 * 2**20 for uploaded in out["bytes_per_minute"].values())
    assert out["requests_per_minute_per_rank"]["4"] <= out["requests_per_minute_per_rank"]["2"]
    assert all(rows["all"] == rows["rank 0"] for rows in out["requests_per_minute"].values())
    assert all(rows["another"] == 0 < 5 < rows["rank 0"] for rows in out["requests_at_start"].values())
    assert out["cpu_seconds_per_step"]["4"] > 0


@pytest.mark.slow
def test_trust_cost_compares_two_commits() -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("no git history")
    out = result(dict(os.environ), "trust_cost.py", "--before", "HEAD", "--images", "16", "--rounds", "1")
    for part in ("loader", "index", "prepare"):
        assert {f"{part}_slower", f"{part}_slower_wall"} <= out.keys()
        assert out[f"{part}_before_per_core"] > 0
    done = run(dict(os.environ), BENCHMARKS / "trust_cost.py", "--before", "no-commit", rc=2)
    assert done.stderr.startswith("error: --before no-commit: ")
