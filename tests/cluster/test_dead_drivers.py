"""What is left of a run whose driver was killed, and what is said of it, on a real head of Ray with a node."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from helpers.ray_head import Head, running
from helpers.runs import arguments

from eagleray.base.files import read_lines
from eagleray.cluster import job_package
from eagleray.cluster.jobs import MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
REQUESTS = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")
actor = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
first = actor.__ray_call__.remote(lambda self: {k: r.first_request_time for k, r in self._ongoing_reqs.items()})
print(json.dumps(ray.get(first)))
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A head that only directs, with memory for one job, and a node."""
    with running(cpus=0, memory=MEMORY * 3 // 2) as head:
        head.join("a")
        yield head


def wait_for(what: str, come: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not come():
        assert time.monotonic() < end, what
        time.sleep(0.5)


def step(out: Path) -> int:
    lines = read_lines(out / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def requests(head: Head) -> dict[str, float]:
    """Return the requests for machines that Ray keeps, with the time at which each was made first."""
    env = head.env | {"RAY_ADDRESS": f"127.0.0.1:{head.port}"}
    done = subprocess.run([sys.executable, "-c", REQUESTS], env=env, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def drivers(head: Head) -> list[psutil.Process]:
    below = psutil.Process(head.process.pid).children(recursive=True)
    return [p for p in below if "eagleray.cli" in p.cmdline() and "-m" in p.cmdline()]


def test_a_killed_driver_is_named_and_its_run_goes_on_at_once(head: Head, small: Path, shards: Path, tmp_path: Path):
    out, other = tmp_path / "out", tmp_path / "other"
    keys = ["workers=1..2", "optim.epochs=100000", "evaluate.probe_epochs=0", "checkpoint.steps=5"]
    args = ["submit", *arguments(small, shards, out, *keys)]
    name = job_package.identify(str(out))
    code, text = head(*args)
    assert code == 0, text
    assert "the cluster has 2 node(s) with 1 CPUs and 0 GPUs now; this asks for 1..2 worker(s)" in text
    wait_for("steps", lambda: step(out) > 10)
    [driver] = drivers(head)
    assert not [m.path for m in driver.memory_maps() if "libtorch" in m.path], "each run would cost the head PyTorch"
    [asked] = requests(head).items()

    killed = time.time()
    driver.send_signal(signal.SIGKILL)
    code, text = head("logs", name, "--follow")
    assert code == 128 + signal.SIGKILL, text
    assert "error: killed by SIGKILL" in text
    assert f"{name}: failed, exit status 137: killed by SIGKILL" in text
    assert [(j["state"], j["status"]) for j in head.jobs()] == [("failed", 137)]
    assert f"{name}: error: killed by SIGKILL" in head("jobs")[1]

    before = step(out)
    code, text = head(*args)
    assert code == 0, text
    assert f"{name}-2: submitted" in text
    wait_for("steps of the continued run", lambda: step(out) > before)
    print(f"first step {time.time() - killed:.0f} s after the kill")
    assert requests(head) == dict([asked]), "the dead driver's request was waited for, and a new one made"
    assert asked[1] < killed

    # The head has room for one job: the next one waits in Ray's queue.
    code, text = head("submit", *arguments(small, shards, other, "workers=1"))
    assert code == 0, text
    waiter = job_package.identify(str(other))
    assert f"{waiter}: waits until another job has ended: each takes 1 GiB of the head" in text
    wait_for("the line", lambda: any(j["waits"] for j in head.jobs() if j["id"] == waiter))
    assert f"{waiter}: waiting for 1 GiB of the head's memory; 1 job(s) run there" in head("jobs")[1]
    code, text = head("stop", waiter)
    assert code == 0, text
    assert f"{waiter}: had not started, and ends as soon as it does" in text
    code, text = head("stop", f"{name}-2")
    assert code == 0, text
    wait_for("the end of the one that waited", lambda: all(j["state"] in ("stopped", "failed") for j in head.jobs()))
    assert not (other / "metrics.jsonl").exists()
    assert requests(head) == {}


def test_a_run_that_waits_gets_what_ray_keeps_for_a_dead_one(head: Head, small: Path, shards: Path, tmp_path: Path):
    """Nobody continues the dead one, whose machines Ray would keep for three minutes."""
    dead, other = tmp_path / "dead", tmp_path / "other"
    keys = ["workers=1..2", "optim.epochs=100000", "evaluate.probe_epochs=0"]
    assert head("submit", *arguments(small, shards, dead, *keys))[0] == 0
    wait_for("steps", lambda: step(dead) > 3)
    [asked] = requests(head).items()
    drivers(head)[0].send_signal(signal.SIGKILL)
    killed = time.time()
    wait_for("the end", lambda: head.jobs()[-1]["state"] == "failed")
    assert head("submit", *arguments(small, shards, other, *keys))[0] == 0
    wait_for("steps of the one that waited", lambda: step(other) > 0)
    print(f"first step {time.time() - killed:.0f} s after the kill")
    assert asked[0] not in requests(head)
    name = head.jobs()[-1]["id"]
    assert "but Ray keeps them for runs that asked before" in head("logs", name)[1]
    assert head("stop", name)[0] == 0


def test_what_a_cluster_has_is_known_after_a_node_has_died(head: Head, small: Path, shards: Path, tmp_path: Path):
    head.join("b")
    node = head.nodes.pop()
    for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
        process.kill()
    node.wait()
    args = ["submit", *arguments(small, shards, tmp_path / "out"), "--gpus", 2]
    told = ""

    def gone() -> bool:
        nonlocal told
        told = head(*args)[1]
        head("stop", head.jobs()[-1]["id"])
        return "2 node(s)" in told

    wait_for("the death of the node is known", gone)
    assert "the cluster has 2 node(s) with 1 CPUs and 0 GPUs now; this asks for 2 worker(s) with a GPU each" in told
