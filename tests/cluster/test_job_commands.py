"""Long commands other than `pretrain` as jobs: what is checked here, what travels, and what the head runs."""

import importlib.metadata
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import forked, ray_auth
from helpers.fake_head import FakeHead
from helpers.plugins import write_plugin, write_recipe

from eagleray.api import job_commands
from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.cluster import job_package, job_start, jobs
from eagleray.cluster.jobs import ENTRY
from eagleray.config import plugins
from eagleray.sweeps import sweep as sweeps

ROOT = Path(__file__).parents[2]


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHead]:
    for name in [n for n in os.environ if n.startswith(("RAY_", "AWS_", "MLFLOW_", "EAGLERAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_auth.read_again()
    monkeypatch.setattr(jobs, "POLL", 0.02)
    fake = FakeHead()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", fake.address)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    monkeypatch.undo()
    ray_auth.read_again()
    plugins.unload()


@pytest.fixture
def eagleray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command, in this process: its exit status, and what it printed to standard output and error."""

    def run(*words: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["eagleray", *map(str, words)])
        code: Any = 0
        try:
            main.main()
        except SystemExit as e:
            code = e.code or 0
        return code, "".join(capsys.readouterr())

    return run


@pytest.fixture
def sweep(tmp_path: Path, small: Path) -> Path:
    tree = {"recipe": str(small), "space": {"method.dim": {"choice": [8, 12]}}, "trials": 2, "scheduler": "none"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree | {"fixed": {"workers": 1, "optim.epochs": 1}}))
    return path


def sent(head: FakeHead) -> tuple[dict[str, Any], list[str], zipfile.ZipFile]:
    """The only job, the words that its head runs, and its package."""
    [job] = head.jobs.values()
    assert job["entrypoint"].startswith(ENTRY)
    return job, shlex.split(job["entrypoint"].removeprefix(ENTRY)), zipfile.ZipFile(io.BytesIO(head.packages[-1]))


def test_a_sweep_travels_with_its_recipes(head: FakeHead, sweep: Path, tmp_path: Path, eagleray):
    data = ["data.train=s3://bucket/train", "data.test=s3://bucket/test", "out=s3://bucket/sweeps/first"]
    code, text = eagleray("submit", "tune", sweep, *data, "--max-concurrent", "4", "sweep.trials=3")
    assert code == 0, text
    assert "asks for 3 trials of 1 worker(s)" in text
    job, words, package = sent(head)
    assert words == ["tune", "sweep.yaml", "--max-concurrent", "4", "--resume"]
    labels = {"eagleray": "tune", "recipe": "mine", "out": "s3://bucket/sweeps/first"}
    assert labels.items() <= job["metadata"].items()
    assert re.fullmatch(r"tune-first-[0-9a-f]{8}", job["submission_id"])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "sweep.yaml").write_bytes(package.read("sweep.yaml"))
    there = sweeps.load(str(tmp_path / "there" / "sweep.yaml"))
    assert (there.out, there.trials) == ("s3://bucket/sweeps/first", 3)
    assert there.alternatives[""].recipe["data"]["train"] == "s3://bucket/train"
    code, text = eagleray("submit", "tune", sweep, *data, "--max-concurrent", "4", "sweep.trials=3")
    assert code == 2
    assert "tune is running already; `eagleray logs" in text
    code, text = eagleray("submit", "tune", sweep, *data, "sweep.trials=5")
    assert "works there with other options; give another out" in text


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["evaluate", "s3://bucket/run", "--train", "s3://b/train", "--workers", "4", "--k", "10"], "4 worker(s)"),
        (["evaluate", "timm:vit_tiny_patch16_224", "--out", "s3://b/eval", "--workers", "2"], "2 worker(s)"),
        (["evaluate", "vit_tiny_patch16_224", "--out", "s3://b/eval", "--workers", "2"], "2 worker(s)"),
        (["evaluate", "hf:timm/vit_tiny", "--out", "s3://b/eval", "--workers", "2"], "2 worker(s)"),
        (["prepare", "folder", "s3://bucket/photos", "s3://bucket/shards", "--dedup", "--size", "64"], "every CPU"),
        (["index", "s3://bucket/train-{000..127}.tar"], "each shard"),
    ],
)
def test_the_head_runs_the_words_that_were_given(head: FakeHead, words: list[str], asks: str, eagleray):
    code, text = eagleray("submit", *words)
    assert code == 0, text
    kind = {"every CPU": "a task on ", "each shard": "a task for "}.get(asks, "")
    assert f"asks for {kind}{asks}" in text
    job, there, _ = sent(head)
    assert there == words
    assert job["metadata"]["eagleray"] == words[0]
    assert job["submission_id"].startswith(f"{words[0]}-")
    [line] = [line for line in eagleray("jobs")[1].splitlines() if job["submission_id"] in line]
    assert words[0] in line.split()


def test_gpus_of_an_evaluation_are_its_workers(head: FakeHead, eagleray):
    code, text = eagleray("submit", "evaluate", "s3://bucket/run", "--train", "s3://b/train", "--gpus", 8)
    assert code == 0, text
    assert "asks for 8 worker(s) with a GPU each" in text
    assert sent(head)[1][-3:] == ["--workers", "8", "--gpus"]


def test_finetuning_is_a_run_from_weights(head: FakeHead, small: Path, eagleray):
    keys = ["data.train=s3://bucket/train", "out=s3://bucket/runs/tuned"]
    code, text = eagleray("submit", "finetune", "s3://bucket/runs/first", small, *keys, "--gpus", "2")
    assert code == 0, text
    job, words, package = sent(head)
    assert words == ["pretrain", "recipe.yaml"]
    assert job["metadata"]["eagleray"] == "finetune"
    tree = yaml.safe_load(package.read("recipe.yaml"))
    assert (tree["backbone"]["weights"], tree["workers"], tree["gpus"]) == ("s3://bucket/runs/first", 2, True)
    assert job["submission_id"] == job_package.identify("s3://bucket/runs/tuned")  # as of any run in that folder


def test_plugins_lie_where_the_command_looks_for_them(head: FakeHead, tmp_path: Path, eagleray):
    write_plugin(tmp_path / "mine")
    path = tmp_path / "mine" / "my_method.py"
    code, text = eagleray("submit", "prepare", "drawers", "s3://b/in", "s3://b/out", "--plugin", path)
    assert code == 0, text
    _, words, package = sent(head)
    assert words == ["prepare", "drawers", "s3://b/in", "s3://b/out", "--plugin", "my_method.py"]
    assert package.read("my_method.py") == path.read_bytes()


@pytest.mark.filterwarnings("ignore:Overwriting vit_of_a_plugin")
def test_a_sweep_travels_with_the_plugins_that_its_recipes_list(
    head: FakeHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eagleray
):
    path = write_plugin(tmp_path / "mine")
    tree = {"recipe": str(write_recipe(tmp_path / "mine")), "space": {"method.dim": {"choice": [8, 12]}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree | {"scheduler": "none", "fixed": {"workers": 1}}))
    code, text = eagleray("submit", "tune", tmp_path / "mine.yaml", "data.train=s3://b/train", "out=s3://b/sweep")
    assert code == 0, text
    _, words, package = sent(head)
    assert words == ["tune", "sweep.yaml", "--resume"]
    package.extractall(there := tmp_path / "there", ["sweep.yaml", path.name])
    plugins.unload()
    monkeypatch.chdir(there)  # as the job's command is run on the head
    assert sweeps.load("sweep.yaml").alternatives[""].recipe["plugins"][0]["name"] == "my_method.py"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["tune", "MINE", "out=sweeps/a", "data.train=s3://b/t"], "out=sweeps/a: a relative path"),
        (["tune", "MINE", "out=s3://b/a", "data.train=shards"], "data.train=shards: a relative path"),
        (["tune", "MINE", "out=s3://b/a", "data.train=s3://b/t", "optim.batch=24", "data.lanes=32"], "data.lanes=32"),
        (["tune", "no_such_sweep", "out=s3://b/a"], "no_such_sweep"),
        (["evaluate", "runs/a", "--workers", "4"], "backbone=runs/a: a relative path"),
        (["evaluate", "s3://b/a", "--train", "shards", "--workers", "4"], "--train=shards: a relative path"),
        (["evaluate", "s3://b/a", "--train", "s3://b/t"], "--workers: missing"),
        (["evaluate", "s3://b/a", "--workers", "4", "--gpus", "4"], "--gpus 4 and --workers: expected only one"),
        (["evaluate", "timm:vit_tiny_patch16_224", "--workers", "4"], "--out is missing"),
        (["evaluate", "--k", "10", "s3://b/a", "--workers", "4"], "--k: expected the backbone before all options"),
        (["evaluate", "s3://b/a", "knn", "--workers", "4"], "knn: expected --SETTING VALUE after the backbone"),
        (["evaluate", "hf:timm/vit_tiny", "--workers", "4"], "--out is missing"),
        (["evaluate", "s3://b/a.pth", "--architecture", "vit_tiny_patch16_224", "--workers", "4"], "--out is missing"),
        (["evaluate", "s3://b/a/export/backbone.safetensors", "--workers", "4"], "--out is missing"),
        (["evaluate", "s3://b/a/export/", "--workers", "4"], "--out is missing"),
        (["prepare", "folder", "photos", "s3://b/out"], "FROM=photos: a relative path"),
        (
            ["prepare", "webdataset", "s3://b/in", "s3://b/out", "--where", "a > 1", "--columns", "a.csv"],
            "--columns=a.csv: a relative path",
        ),
        (["prepare", "folder", "s3://b/in", "s3://b/out", "--workers", "0"], "--workers 0: expected at least one"),
        (["tune", "MINE", "out=s3://b/a", "data.train=s3://b/t", "--max-hours", "2"], "a sweep has sweep.hours"),
        (["index", "shards/"], "URL=shards/: a relative path"),
        (["index", "s3://b/shards", "--gpus", "2"], "--gpus 2: only for runs and evaluate"),
        (["finetune", "runs/a", "dino_vits16_in1k_ep100"], "WEIGHTS=runs/a: a relative path"),
        (
            ["mocov3_vitxs8_shapes_demo", "data.train={url: s3://b/t, exclude: gone.csv}", "out=s3://b/a"],
            "data.train=gone.csv: a relative path",
        ),
    ],
)
def test_a_wrong_command_is_not_sent(head: FakeHead, sweep: Path, words: list[str], wanted: str, eagleray):
    code, text = eagleray("submit", *[str(sweep) if w == "MINE" else w for w in words])
    assert code == 2, text
    [line] = text.strip().splitlines()
    assert line.startswith("error: ")
    assert wanted in line
    assert head.asked == 0


def test_the_commands_own_parser_refuses_its_options(head: FakeHead, eagleray):
    for words in (
        ["index", "s3://b/s", "--bogus", "1"],
        ["tune", "x", "--max-concurrent", "many"],
        ["prepare", "folder"],
    ):
        code, text = eagleray("submit", *words)
        assert code == 2, text
        assert "error: " in text or "Usage: eagleray" in text
    assert head.asked == 0


def test_a_job_that_waits_says_what_for(head: FakeHead, eagleray):
    line = "waiting for 8 worker(s) with 12 CPUs and 1 GPU each; the cluster has 1 node(s) with 0 CPUs and 0 GPUs"
    head.add("first")
    head.logs["first"] += f"begins\n{line}\n"
    head.add("second")
    head.logs["second"] += f"{line}\nstep 1/20\n"
    table = eagleray("jobs")[1].splitlines()
    assert [row.split()[1] for row in table[1:3]] == ["waiting", "running"]
    assert table[3:] == [f"first: {line}"]
    told = json.loads(eagleray("jobs", "--json")[1])
    assert [j["waits"] for j in told] == [line, ""]
    assert [j["command"] for j in told] == ["pretrain", "pretrain"]


# What stands for a process of the cluster's Ray: it has the library in memory, and starts a shell.
PARENT = """
import mmap, subprocess, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sys.exit(subprocess.call(["sh", "-c", sys.argv[2]]))
"""


def test_a_job_runs_in_the_environment_of_the_clusters_ray(tmp_path: Path):
    library = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "ray" / "_raylet.so"
    library.parent.mkdir(parents=True)
    library.write_text("of Ray")
    (tmp_path / "env" / "bin").mkdir()
    python = tmp_path / "env" / "bin" / "python3"
    python.write_text('#!/bin/sh\necho "here: $*"\n')
    command = [sys.executable, "-c", PARENT, str(library), f"{ENTRY} tune 'a b'"]
    python.chmod(0o755)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "here: eagleray/cluster/job_start.py eagleray.cli tune a b\n", done.stderr


def test_an_environment_without_a_package_is_one_line(tmp_path: Path):
    """An interpreter with nothing but its own library, as `python3` on PATH often is."""
    bare = [sys.executable, "-I", "-S", job_start.__file__, "pretrain", "recipe.yaml"]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "the environment of the cluster's Ray (Python 3" in line
    assert "lacks torch, torchvision, timm" in line
    assert job_start.missing(job_start.MODULES) == []
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.match(r"[\w-]+", line)[0] for line in listed} == set(job_start.MODULES)  # type: ignore[index]
    names = importlib.metadata.packages_distributions()
    assert all(name.lower() in [n.lower() for n in names[module]] for name, module in job_start.MODULES.items())


KILLED = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text('oom_kill 8\\n'); os.kill(os.getpid(), 9)"


def test_what_killed_a_command_is_a_line_and_its_status(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr(job_start, "VMSTAT", count := tmp_path / "vmstat")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    count.write_text("nr_free_pages 1\noom_kill 7\n")
    try:
        assert job_start.run([sys.executable, "-c", "raise SystemExit(75)"]) == 75
        assert job_start.run([sys.executable, "-c", KILLED, str(count)]) == 137
        assert job_start.run([sys.executable, "-c", KILLED, str(count)]) == 137
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    short = ": this machine has run out of memory, and its kernel has ended processes"
    assert capfd.readouterr().err.splitlines() == [f"error: killed by SIGKILL{short}", "error: killed by SIGKILL"]


CHATTER = """
import os, sys
from pathlib import Path
from eagleray.cluster.session import divert_stderr
with divert_stderr(Path(sys.argv[1])):
    os.write(2, b"(raylet) a node has died\\n")
    os.system("echo a child >&2")
    print("ours", file=sys.stderr)
    print("the log")
os.write(2, b"after\\n")
print("error: ours too", file=sys.stderr)
"""


def test_the_chatter_of_ray_goes_to_a_file(tmp_path: Path):
    log = tmp_path / "out" / "ray.log"
    command = [sys.executable, "-c", CHATTER, str(log)]
    done = forked.run(command, capture_output=True, text=True, timeout=60)
    assert log.read_text() == "(raylet) a node has died\na child\n"
    assert done.stderr == "ours\nafter\nerror: ours too\n"
    assert done.stdout == "the log\n"


def test_every_place_that_a_sweep_varies_is_checked(tmp_path: Path):
    space = {"data.train": {"choice": [str(tmp_path), "b"]}}
    sweep = {"recipe": "mocov3_vitxs8_cifar10_ep2", "space": space, "objective": {"key": "monitor/knn"}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(sweep))
    with pytest.raises(UserError, match=r"data\.train=b: a relative path"):
        job_commands.pack("tune", [str(tmp_path / "s.yaml"), f"out={tmp_path / 'out'}"], {}, (), None)
