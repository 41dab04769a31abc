"""Runs sent to a cluster: what travels, what is said, and that a run survives being stopped and sent again."""

import io
import json
import os
import re
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ray_auth
from helpers.fake_head import FakeHead
from helpers.processes import wait_for

from eagleray.base.errors import Outage
from eagleray.cli import main
from eagleray.cluster import job_package, jobs
from eagleray.config import bundled
from eagleray.runs import recipe

TOKEN = "test-0123456789abcdef"
SECRETS = {"AWS_ACCESS_KEY_ID": "TESTACCESS", "AWS_SECRET_ACCESS_KEY": "testsecret", "RAY_AUTH_TOKEN": TOKEN}


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHead]:
    monkeypatch.setattr(jobs, "POLL", 0.02)
    fake = FakeHead()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray reads how it is to ask once in a process; what follows in this one is to read it again."""
    for name in [n for n in os.environ if n.startswith(("RAY_", "AWS_", "MLFLOW_", "EAGLERAY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # the commands set it: it shall be put back
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_auth.read_again()
    yield
    monkeypatch.undo()
    ray_auth.read_again()


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def eagleray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command, in this process."""

    def run(*args: Any) -> Ran:
        monkeypatch.setattr(sys, "argv", ["eagleray", *map(str, args)])
        try:
            main.main()
            code: Any = 0
        except SystemExit as e:
            code = e.code or 0
        return Ran(code, *capsys.readouterr())

    return run


def refusal(ran: Ran, code: int = 2) -> str:
    """The one line of it."""
    assert ran.code == code, (ran.out, ran.err)
    lines = ran.err.strip().splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("error: ")
    return lines[0]


KEYS = ["data.train=s3://bucket/train", "out=s3://bucket/runs/first"]


def test_only_the_package_and_the_recipe_travel(
    head: FakeHead, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eagleray: Callable[..., Ran]
):
    for name, value in (
        SECRETS | {"AWS_ENDPOINT_URL": "http://store:9000", "EAGLERAY_API_TOKEN": "t", "HOME_X": "y"}
    ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow:5000")
    monkeypatch.setenv("EAGLERAY_USER", "ada")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "private.txt").write_text("private")
    (tmp_path / "mine" / "over.yaml").write_text(f"base: {small}\nseed: 7\n")
    monkeypatch.chdir(tmp_path / "mine")
    ran = eagleray(
        "submit", "over.yaml", *KEYS, "optim.epochs=3", "--gpus", 2, "--max-hours", 1.5, "--address", head.address
    )
    assert ran.code == 0, ran.err
    [job] = head.jobs.values()
    sent = {"AWS_ENDPOINT_URL": "http://store:9000", "MLFLOW_TRACKING_URI": "https://mlflow:5000"}
    sent |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    assert job["runtime_env"]["env_vars"] == sent | jobs.STOP | {"EAGLERAY_USER": "ada"}
    assert job["metadata"]["user"] == "ada"
    assert job["entrypoint"].endswith(" pretrain recipe.yaml --max-hours 1.5")
    assert "entrypoint_num_cpus" not in job, "the head may have none"
    assert (job["entrypoint_memory"], job["entrypoint_resources"]) == (jobs.MEMORY, {jobs.HEAD: 0.001})
    [package] = head.packages
    files = zipfile.ZipFile(io.BytesIO(package))
    names = {n for n in files.namelist() if not n.endswith("/")}
    assert {n.partition("/")[0] for n in names} == {"eagleray", "recipe.yaml"}
    assert {"eagleray/cli/main.py", "eagleray/cluster/jobs.py"} <= names
    assert not [n for n in names if "__pycache__" in n]
    place = "pipelines/detection"  # where an evaluation on the cluster finds its schedule
    schedules = {f"eagleray/_bundled/{place}/{path.name}" for path in bundled.folder(place).iterdir()}
    assert {n for n in names if "_bundled" in n} == schedules > set()
    tree = yaml.safe_load(files.read("recipe.yaml"))
    assert (tree["seed"], tree["optim"]["epochs"], tree["workers"], "base" in tree) == (7, 3, 2, False)
    (tmp_path / "sent.yaml").write_bytes(files.read("recipe.yaml"))
    recipe.load(str(tmp_path / "sent.yaml"))
    everything = json.dumps(job).encode() + b"".join(files.read(n) for n in names)
    for secret in [*SECRETS.values(), "private"]:
        assert secret.encode() not in everything or secret == "private"
    assert b"private.txt" not in package


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["optim.btach=32"], "optim.btach: unknown key; did you mean 'optim.batch'?"),
        (["out=runs/first"], "out=runs/first: a relative path; expected an s3:// URL"),
        (["out=~/first"], "out=~/first: a relative path"),
        (["out=gcs://bucket/first"], "unknown scheme 'gcs'"),
        (["out=https://host/first"], "out=https://host/first: a web server can only be read"),
        (["data.train=shards"], "data.train=shards: a relative path"),
        (["backbone.weights=runs/a"], "backbone.weights=runs/a: a relative path"),
        (["data.test=file://shards"], "data.test=file://shards: a relative path"),
        (["data.cache=cache"], "data.cache=cache: a relative path"),
        (["data.train=null"], "data.train: missing"),
        (["optim.batch=24", "data.lanes=32"], "a global batch of 24 cannot be divided into 32 lanes"),
        (["--folow"], "--folow: no such option of submit pretrain"),
        (["--gpu", "h9000"], "h9000"),
        (["--most", "4"], "--most: no such option of submit pretrain"),
        (["workers=2", "--gpus", "4"], "--gpus 4 and workers=2: expected only one of the two"),
        (["backbone.options={img_size: 16, patch_size: 8, embed_dim: 25, num_heads: 3}"], "backbone"),
    ],
)
def test_a_wrong_run_is_not_sent(
    arguments: list[str], wanted: str, head: FakeHead, small: Path, eagleray: Callable[..., Ran]
):
    line = refusal(eagleray("submit", small, *KEYS, *arguments, "--address", head.address))
    assert wanted in line
    assert head.asked == 0


def test_a_recipe_without_out_needs_one(head: FakeHead, small: Path, eagleray: Callable[..., Ran]):
    assert "out=runs/small: a relative path" in refusal(eagleray("submit", small, KEYS[0], "--address", head.address))


def test_a_password_does_not_travel_and_is_not_repeated(
    head: FakeHead, small: Path, eagleray: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hidden@mlflow:5000")
    line = refusal(eagleray("submit", small, *KEYS, "--address", head.address))
    assert line.startswith("error: MLFLOW_TRACKING_URI: contains a user or password")
    assert "MLFLOW_TRACKING_PASSWORD" in line
    assert "hidden" not in line
    assert head.asked == 0
    assert "hidden" not in refusal(eagleray("jobs", "--address", "http://me:hidden@head:8265"))


@pytest.mark.parametrize(
    "words",
    [
        ["pretrain", "{small}", "data.train=s3://bucket/train", "out=s3://AKIAKEY:TOP/SECRET@bucket/run"],
        ["{small}", "data.train=s3://AKIAKEY:TOP/SECRET@bucket/train", "out=s3://bucket/run"],
        ["index", "s3://AKIAKEY:TOP/SECRET@bucket/train"],
        ["prepare", "folder", "https://host/x?X-Amz-Signature=TOPSECRET", "s3://bucket/train", "--workers", "1"],
        ["evaluate", "timm:resnet18", "--out", "s3://b/o", "--train", "s3://KEY:TOPSECRET@b/t", "--workers", "1"],
    ],
)
def test_keys_in_urls_do_not_travel_and_are_not_repeated(
    head: FakeHead, small: Path, eagleray: Callable[..., Ran], words: list[str]
):
    line = refusal(eagleray("submit", *[w.format(small=small) for w in words], "--address", head.address))
    assert "contains a user, password or key" in line
    assert "TOP" not in line
    assert "AKIA" not in line
    assert head.asked == 0


def test_variables_that_may_hold_secrets_stay_here():
    sent, stays = job_package.environment({"NCCL_DEBUG": "INFO", "TORCH_HUB_TOKEN": "hidden", "FI_KEY": "hidden"})
    assert sent == {"NCCL_DEBUG": "INFO"}
    assert stays == [f"{name} is not sent: it may hold a secret" for name in ("FI_KEY", "TORCH_HUB_TOKEN")]


def test_a_tracking_database_of_this_machine_stays_here():
    sent, stays = job_package.environment(
        {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", "AWS_DEFAULT_REGION": "eu-west-1"}
    )
    assert sent == {"AWS_DEFAULT_REGION": "eu-west-1"}
    assert len(stays) == 1


def test_what_networks_are_tuned_with_travels():
    tuned = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "FI_PROVIDER": "efa", "OMP_NUM_THREADS": "4"}
    tuned |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "RAY_TRAIN_NCCL_RAS_ACTION": "observe"}
    here = {"TORCH_HOME": "/home/me", "FINAL": "x", "RAY_AUTH_TOKEN": TOKEN, "AWS_SECRET_ACCESS_KEY": "x"}
    assert job_package.environment(tuned | here) == (tuned, [])


def test_addresses(head: FakeHead, eagleray: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    assert "--address: missing" in refusal(eagleray("jobs"))
    assert "--address head:8265: expected" in refusal(eagleray("jobs", "--address", "head:8265"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "RAY_ADDRESS auto: expected the dashboard" in refusal(eagleray("jobs"))
    # What is said here counts, whatever the environment says.
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    assert eagleray("jobs", "--address", head.address).code == 0
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    assert eagleray("jobs").code == 0


def test_an_address_counts_for_its_own_call_alone(head: FakeHead):
    jobs.Cluster(head.address).size()
    assert os.environ["RAY_API_SERVER_ADDRESS"] == ""


def test_no_head_there(head: FakeHead, eagleray: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{s.getsockname()[1]}"
    assert f"{nobody}: nobody answers there; expected" in refusal(eagleray("jobs", "--address", nobody))
    for status, text, wanted in (
        (404, "no", "404"),
        (200, "<html>", "something answered that is not a Ray head"),
        (200, "{}", "something answered that is not a Ray head"),
        (503, "no", "it answered 503"),
        (401, "no", "the cluster requires a token; set RAY_AUTH_MODE=token"),
        (403, "no", "the cluster refuses the token"),
    ):
        head.broken = lambda reply=(status, text): reply
        assert wanted in refusal(eagleray("jobs", "--address", head.address))
    monkeypatch.setattr(jobs, "TIMEOUTS", (0.5, 0.5))
    over = threading.Event()
    head.broken = lambda: (over.wait(60), None)[1]  # it takes the request, and does not answer
    assert "nobody answers there" in refusal(eagleray("jobs", "--address", head.address))
    over.set()


def test_unknown_ids(head: FakeHead, eagleray: Callable[..., Ran]):
    head.add("first-00000000")
    for command in (["logs"], ["logs", "--follow"], ["stop"]):
        line = refusal(eagleray(*command, "first-00000001", "--address", head.address))
        assert f"first-00000001: no such job at {head.address}; did you mean 'first-00000000'?" in line


def test_a_run_runs_once_and_again_under_a_new_id(head: FakeHead, small: Path, eagleray: Callable[..., Ran]):
    def submit(*more: str) -> Ran:
        return eagleray("submit", small, *KEYS, *more, "--address", head.address)

    assert submit().code == 0
    [name] = head.jobs
    assert name == job_package.identify("s3://bucket/runs/first/")
    assert re.fullmatch(r"first-[0-9a-f]{8}", name)
    line = refusal(submit())
    assert f"{name}: this run is being trained already" in line
    assert f"`eagleray logs {name} --follow`" in line
    assert "another recipe" in refusal(submit("seed=3", "--follow"))
    head.then = lambda: head.set(name, "SUCCEEDED", 0)
    assert submit("--follow").code == 0
    assert list(head.jobs) == [name]
    for status, code, following in (("FAILED", 1, f"{name}-2"), ("STOPPED", None, f"{name}-3")):
        head.set(list(head.jobs)[-1], status, code)
        assert submit().code == 0
        assert list(head.jobs)[-1] == following
    assert submit("out=s3://other/runs/first").code == 0
    assert not list(head.jobs)[-1].startswith(name)


@pytest.mark.parametrize("memory", [jobs.MEMORY // 2, jobs.MEMORY * 5 // 2])
def test_what_the_cluster_has_is_known_after_nodes_have_died(
    memory: int, head: FakeHead, small: Path, eagleray: Callable[..., Ran]
):
    worker = {"node_id": "a", "node_ip": "1", "node_name": "1", "is_head_node": False, "state": "ALIVE", "labels": {}}
    worker |= {"state_message": "", "resources_total": {"CPU": 4.0}}
    head.nodes = [worker, worker | {"is_head_node": True, "resources_total": {"memory": float(memory)}}]
    keys = [KEYS[0], "workers=2"]
    said = [eagleray("submit", small, *keys, f"out=s3://b/{n}", "--address", head.address) for n in range(3)]
    assert "the cluster has 2 node(s) with 4 CPUs and 0 GPUs now; this asks for 2 worker(s)" in said[0].out
    assert all(job["entrypoint_memory"] == min(jobs.MEMORY, memory) for job in head.jobs.values())
    waits = [f"which has {memory / 2**30:.1f} GiB for jobs" in ran.out for ran in said]
    assert waits == [False, memory < jobs.MEMORY, True]
    head.nodes = []
    head.knows_nodes = False
    last = eagleray("submit", small, *keys, "out=s3://b/last", "--address", head.address)
    assert "the cluster does not say what it has; this asks for 2 worker(s)" in last.out
    assert "waits" not in last.out


def test_whoever_is_faster_runs_it(head: FakeHead, small: Path):
    """Two submit at once: one job, and the other is told."""
    cluster = jobs.Cluster(head.address)
    sent = job_package.pack(str(small), KEYS, None)
    submit = cluster.submit

    def late(name: str, *rest: Any) -> None:
        if not head.jobs:
            head.add(name, metadata=sent.labels)
        submit(name, *rest)

    cluster.submit = late  # type: ignore[method-assign]
    said: list[str] = []
    assert jobs.submit(cluster, sent, {}, said.append, join=True) == sent.id
    assert said[-1] == f"{sent.id}: this run is being trained already"


@pytest.mark.parametrize(
    ("status", "code", "exits"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", 1, 1),
        ("FAILED", -9, 137),
        ("FAILED", 137, 137),
        ("FAILED", None, 1),
        ("STOPPED", None, 1),
    ],
)
def test_a_follower_exits_as_the_job(
    status: str, code: int | None, exits: int, head: FakeHead, eagleray: Callable[..., Ran]
):
    head.add("run")
    head.logs["run"] += "one\ntwo [/not a tag]\nlast, cut"
    head.set("run", status, code, "no node")
    ran = eagleray("logs", "run", "--follow", "--address", head.address)
    assert ran.code == exits
    lines = ran.out.splitlines()
    assert lines[:3] == ["one", "two [/not a tag]", "last, cut"]
    assert lines[3].startswith(f"run: {status.lower()}")
    assert ("no node" in lines[3]) == (status == "FAILED" and code is None)
    assert ("killed by SIGKILL" in lines[3]) == (exits == 137)
    assert eagleray("logs", "run", "--address", head.address).out.splitlines() == lines[:3]


def test_a_follower_outlives_an_outage_and_says_each_line_once(head: FakeHead):
    head.add("run")
    cluster = jobs.Cluster(head.address)
    wanted = [f"line {i} of the run" for i in range(200)]
    text = "".join(f"{line}\n" for line in wanted)
    met = threading.Event()

    def away() -> tuple[int, str]:
        met.set()
        return 500, "Traceback\nboom"

    def write() -> None:
        start = head.logs["run"]
        for at in range(0, len(text), 37):  # in pieces that are no lines
            head.logs["run"] = start + text[: at + 37]
            head.broken = away if 1000 < at < 2000 else None
            wait_for(lambda: met.is_set() or not head.broken)  # the follower has met the outage
            time.sleep(0.01)
        head.set("run", "SUCCEEDED", 0)

    thread = threading.Thread(target=write)
    head.then = thread.start
    said: list[str] = []
    assert jobs.follow(cluster, "run", said.append) == 0
    thread.join()
    assert [line for line in said if line in wanted] == wanted
    others = [line for line in said if line not in wanted]
    assert len(others) == 2, others
    assert "it answered 500" in others[0]
    assert others[1] == "run: succeeded"


def test_a_follower_gives_up_in_the_end(head: FakeHead):
    head.add("run")
    cluster = jobs.Cluster(head.address)

    def away() -> None:
        head.broken = lambda: (500, "away")

    head.then = away
    said: list[str] = []
    with pytest.raises(Outage, match=r"it answered 500.* the job may still be running: `eagleray logs run --follow`"):
        jobs.follow(cluster, "run", said.append, patience=0.5)
    assert len(said) == 1
    head.broken = None
    head.then = head.jobs.clear
    with pytest.raises(Outage, match="has restarted and does not know this job; submitting the run again continues it"):
        jobs.follow(cluster, "run", said.append)


def test_leaving_does_not_stop_the_job(head: FakeHead, eagleray: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    head.add("run")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.time, "sleep", interrupt)
    ran = eagleray("logs", "run", "--follow", "--address", head.address)
    assert ran.code == 130
    assert ran.out.splitlines()[-1].startswith("run: goes on; `eagleray logs run --follow` follows it")
    assert head.jobs["run"]["status"] == "RUNNING"


def test_stopping_waits_for_the_end(head: FakeHead, eagleray: Callable[..., Ran]):
    head.add("run")
    head.logs["run"] += "stopped at step 3 of 9\n"
    ran = eagleray("stop", "run", "--address", head.address)
    assert ran.code == 0
    assert ran.out.splitlines()[1:] == [
        "stopped at step 3 of 9",
        "run: stopped; submitting the same run again continues it",
    ]
    assert "had ended already: stopped" in eagleray("stop", "run", "--address", head.address).out


def test_the_table_of_jobs(head: FakeHead, eagleray: Callable[..., Ran]):
    head.add("run-1")
    head.add("run-2")
    head.add("other", metadata={})
    head.jobs["run-2"]["metadata"] = head.jobs["run-1"]["metadata"] | {"out": "/other"}
    head.set("run-1", "FAILED", 2, "Job entrypoint command failed, last logs:\nstep 1\nno such file")
    told = json.loads(eagleray("jobs", "--json", "--address", head.address).out)
    assert [j["id"] for j in told] == ["run-1", "run-2"]
    first = {"id": "run-1", "state": "failed", "recipe": "small", "out": "/o", "since": 10**9, "seconds": 5.0}
    assert first.items() <= told[0].items()
    assert told[0]["status"] == 2
    lines = eagleray("jobs", "--address", head.address).out.splitlines()
    assert lines[0].split() == ["ID", "USER", "STATE", "COMMAND", "RECIPE", "OUT", "SINCE", "DURATION", "STATUS"]
    assert len(lines) == 4
    assert "0:00:05" in lines[1]
    assert lines[3].startswith("run-1: Job entrypoint command failed, last logs: step 1")
    head.add("run-3", start_time=10**12 + 9000)
    assert len(eagleray("jobs", "--address", head.address).out.splitlines()) == 4, "sent again since"


def test_a_killed_job_says_by_what(head: FakeHead, eagleray: Callable[..., Ran]):
    head.add("run")
    told = "error: killed by SIGKILL: this machine has run out of memory, and its kernel has ended processes"
    head.set("run", "FAILED", 137, f"Job entrypoint command failed with exit code 137, last logs:\nstep 1\n{told}\n")
    lines = eagleray("jobs", "--address", head.address).out.splitlines()
    assert lines[1].endswith("SIGKILL")
    assert lines[2] == f"run: {told}"
    assert eagleray("logs", "run", "--follow", "--address", head.address).code == 137


def test_a_job_that_the_head_has_no_room_for_waits(head: FakeHead, eagleray: Callable[..., Ran]):
    head.add("first")
    head.add("second", "PENDING", message="Job has not started yet.")
    lines = eagleray("jobs", "--address", head.address).out.splitlines()
    assert " waiting " in lines[2]
    assert lines[3] == "second: waiting for 1 GiB of the head's memory; 1 job(s) run there with as much each"
    head.then = lambda: head.set("second", "SUCCEEDED", 0)
    said = eagleray("logs", "second", "--follow", "--address", head.address).out.splitlines()
    assert said == [lines[3].removeprefix("second: "), "second: succeeded"]
    head.add("second", "PENDING")
    ran = eagleray("stop", "second", "--address", head.address)
    assert ran.out == "second: had not started, and ends as soon as it does\n"
    assert ran.code == 0


def test_jobs_are_listed_once_however_many_wait(head: FakeHead, eagleray: Callable[..., Ran]):
    for name in "abcd":
        head.add(name, "PENDING", message="Job has not started yet.")
    text = eagleray("jobs", "--address", head.address).out
    assert text.count(": waiting for 1 GiB of the head's memory; 0 job(s) run there") == 4
    assert head.asked == 2, "its version and its jobs"


def test_a_head_that_goes_away_is_no_error_of_what_waits(head: FakeHead):
    head.add("second", "PENDING", message="Job has not started yet.")
    cluster = jobs.Cluster(head.address)
    [job] = cluster.jobs()
    assert cluster.waits(job).startswith("waiting for 1 GiB")
    head.broken = lambda: (503, "away")
    assert cluster.waits(job) == ""


def test_a_run_is_submitted_though_the_head_goes_away_then(
    head: FakeHead, small: Path, eagleray: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
):
    told = head.reply
    away = lambda path: path in ("/api/jobs/", "/api/version") and bool(head.jobs)  # noqa: E731
    monkeypatch.setattr(head, "reply", lambda v, p, b: (503, "away") if v == "GET" and away(p) else told(v, p, b))
    worker = {"node_id": "a", "node_ip": "1", "node_name": "1", "is_head_node": True, "state": "ALIVE", "labels": {}}
    head.nodes = [worker | {"state_message": "", "resources_total": {"memory": float(jobs.MEMORY)}}]
    ran = eagleray("submit", small, KEYS[0], "workers=2", "out=s3://b/a", "--address", head.address)
    assert ran.code == 0, ran.err
    assert ": submitted, " in ran.out


def test_my_own_jobs(head: FakeHead, eagleray: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    for name, user in ("mine", "ada"), ("hers", "grace"):
        head.add(name, metadata={"eagleray": "pretrain", "recipe": "small", "out": "/o", "digest": "d", "user": user})
    head.add("older", metadata={"eagleray": "pretrain", "recipe": "small", "out": "/o", "digest": "d"})
    monkeypatch.setenv("EAGLERAY_USER", "ada")
    told = json.loads(eagleray("jobs", "--mine", "--json", "--address", head.address).out)
    assert [(j["id"], j["user"]) for j in told] == [("mine", "ada")]
    lines = eagleray("jobs", "--address", head.address).out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["mine", "ada"], ["hers", "grace"]]


def test_no_id_looks_like_an_option():
    assert re.fullmatch(r"run-[0-9a-f]{8}", job_package.identify("/shared/runs/实验"))
