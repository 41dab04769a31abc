"""A run on a cluster whose nodes come and go: Ray's own nodes, several of them on this machine."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.check import Steps, steps, verify
from chaos.job import TRACING, Job, Run
from chaos.site import RECIPE

from eagleray.base.files import read_lines
from eagleray.cluster.session import ENVIRONMENT
from eagleray.runs.plan import make_plan, resolve_paths

pytestmark = pytest.mark.slow
KEYS = ["log_steps=1", "checkpoint.steps=20", "monitor.every=1000", "optim.epochs=10000"]
NOTICE = 40  # seconds between being told and being taken away


@pytest.fixture
def run(shards: Path, tmp_path: Path) -> Iterator[Run]:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE)
    with Run(recipe, str(shards / "train"), tmp_path / "run") as run:
        yield run


@pytest.fixture
def cluster(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that only directs; what runs on its nodes is traced, and takes its time."""
    from ray.cluster_utils import Cluster

    run.tracing.mkdir(parents=True)
    settings = ENVIRONMENT | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "EAGLERAY_PACE": "0.1"}
    settings |= {"EAGLERAY_TRACE": str(run.tracing), "PYTHONPATH": str(TRACING)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def add(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)


def drain(cluster: Any, node: Any) -> None:
    """What a cloud's notice of preemption comes to."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = GcsClient(address=cluster.gcs_address)
    taken, why = client.drain_node(node.node_id, reason, "spot", int((time.time() + NOTICE) * 1000))
    assert taken, why


def wait_for(what: str, job: Job, come: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not come():
        assert job.process.poll() is None, f"ended before {what}: {job.said()}"
        assert time.monotonic() < end, f"{what}: not in {seconds:.0f} s: {job.said()}"
        time.sleep(0.2)


@pytest.mark.timeout(1800)
def test_nodes_come_and_go_and_no_sample_is_lost_or_given_twice(run: Run, cluster: Any):
    def starts() -> list[dict[str, Any]]:
        return [line for line in read_lines(run.out / "starts.jsonl") if "step" in line]

    def training(ranks: int, more: int = 15) -> None:
        """Wait until so many ranks have taken some steps since they began together."""

        def come() -> bool:
            lines = read_lines(run.out / "metrics.jsonl")
            begun = starts()
            return bool(
                begun and lines and begun[-1]["ranks"] == ranks and lines[-1]["step"] >= begun[-1]["step"] + more
            )

        wait_for(f"{ranks} rank(s) training", job, come)

    nodes = [add(cluster), add(cluster)]
    job = run.start(0, 0, *KEYS, "workers=1..3")
    training(2, more=45)
    nodes.append(add(cluster))
    training(3, more=45)
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    training(2)
    going = nodes.pop()
    drain(cluster, going)
    told = time.monotonic()
    training(1)
    assert time.monotonic() - told < NOTICE + 120
    moved = starts()[-1]
    assert moved["reached"] == moved["step"], "steps were taken again although the notice came in time"
    cluster.remove_node(going, allow_graceful=False)
    training(1, more=30)
    assert [s["ranks"] for s in starts()] == [2, 3, 2, 1]
    assert all(s["reached"] - s["step"] <= 20 + 5 for s in starts())
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 1, job.said()
    last = read_lines(run.out / "metrics.jsonl")[-1]["step"]

    job = run.start(0, 0, *KEYS, "workers=1", f"max_steps={last + 10}")  # the driver's end is no end of the run
    assert job.finish(240) == 0, job.said()
    wanted = uninterrupted(run, last + 10)
    lines = [line for line in run.lines() if line.step <= last + 10]
    verify(lines, wanted, last + 10)


def uninterrupted(run: Run, last: int) -> Steps:
    """What one process is given that nobody disturbs: read, not trained on."""
    from eagleray.data.loader import Loader
    from eagleray.engine import world
    from eagleray.runs import recipe

    r = resolve_paths(recipe.load(str(run.recipe), [*KEYS, f"data.train={run.data}", f"out={run.out}", "workers=0"]))
    os.environ["EAGLERAY_PACE"] = "0"
    traced = Run(run.recipe, run.data, run.out.with_name("alone"))
    traced.tracing.mkdir()
    os.environ["EAGLERAY_TRACE"] = str(traced.tracing)
    from chaos.trace.sitecustomize import traced as traced_by

    batches = traced_by(Loader.batches)
    loader = Loader(make_plan(r).stream, rank=0, ranks=1, workers=0, device=world.local().device)
    for _ in batches(loader, 0, last):
        pass
    return steps(traced.lines())
