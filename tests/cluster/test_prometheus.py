"""What Prometheus finds of a run, and the dashboard that shows it."""

import itertools
import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.deploy import exported

from eagleray.cluster.prometheus import Gauges, wanted

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "eagleray.json"


RUN = "s3://bucket/runs/demo"
TAGS = {"run": RUN, "method": "dino", "user": "ada"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]


def test_the_dashboard_asks_for_what_there_is(dashboard: dict[str, Any]):
    reporter = pytest.importorskip("ray.dashboard.modules.reporter.reporter_agent")
    known = exported() | {f"ray_{name}" for name in reporter.METRICS_GAUGES}
    asked = {name for e in expressions(dashboard) for name in re.findall(r"\bray_\w+", e)}
    assert asked <= known
    promised = ("images_per_second", "data_wait_ratio", "loss", "progress_ratio", "goodput_ratio", "restarts")
    promised = (*promised, "health_findings_total", "planned_steps")
    assert asked >= {f"ray_eagleray_{name}" for name in promised} | {"ray_node_gpus_utilization"}
    assert all('{run=~"$run",user=~"$user"}' in e for e in expressions(dashboard) if "ray_eagleray_" in e)


def test_the_dashboard_is_in_order(dashboard: dict[str, Any]):
    panels = dashboard["panels"]
    assert dashboard["schemaVersion"] >= 39
    assert "id" not in dashboard, "Grafana gives it"
    assert {v["name"] for v in dashboard["templating"]["list"]} == {"datasource", "user", "run"}
    assert all(p["datasource"]["uid"] == "${datasource}" for p in panels if p["type"] != "row")
    assert len({p["id"] for p in panels}) == len({p["title"] for p in panels}) == len(panels)
    [memory] = [p for p in panels if "ray_node_gram_used" in json.dumps(p)]
    assert memory["fieldConfig"]["defaults"]["unit"] == "mbytes", "MiB, in which Ray counts it"
    for p in panels:
        assert 0 <= p["gridPos"]["x"] < p["gridPos"]["x"] + p["gridPos"]["w"] <= 24
        assert len({t["refId"] for t in p.get("targets", [])}) == len(p.get("targets", []))
    for a, b in itertools.combinations([p["gridPos"] for p in panels], 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (a, b)


@pytest.mark.slow
def test_ray_serves_them():
    """A line of metrics.jsonl from a worker, and what its node answers to Prometheus. Ray drops what is not set again:
    the gauges stay as long as the worker, and that of the command longer."""
    import ray
    from ray.util.metrics import Gauge

    # Under the system's folder: the paths of sockets must be short.
    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        worker = ray.remote(Worker).options(num_cpus=0.1).remote()
        held = ray.get(worker.tell.remote())
        port, every = ray.nodes()[0]["MetricsExportPort"], exported() - {"ray_eagleray_knn_accuracy_percent"}
        with wanted(RUN, "dino", "ada", 8):
            found = once(port, lambda found: not every - found.keys())
            assert found["ray_eagleray_loss"] == (TAGS, 2.5)
            assert found["ray_eagleray_wanted_workers"] == (TAGS, 8)
            assert found["ray_eagleray_progress_ratio"][1] == pytest.approx(0.25)
            assert found["ray_eagleray_planned_steps"][1] == 40
            assert found["ray_eagleray_restarts"][1] == 1
            tags, count = found["ray_eagleray_health_findings_total"]
            assert tags["kind"] == "collapse"
            assert count == 2
            assert "ray_eagleray_knn_accuracy_percent" not in found
            assert held < 0.05
            Gauge("eagleray_set_once", "To be dropped").set(1)
            once(port, lambda found: "ray_eagleray_set_once" in found)
            assert not every - once(port, lambda found: "ray_eagleray_set_once" not in found).keys()
            ray.kill(worker)
            assert "ray_eagleray_wanted_workers" in once(port, lambda found: "ray_eagleray_step" not in found)
        once(port, lambda found: "ray_eagleray_wanted_workers" not in found)
    finally:
        ray.shutdown()


def once(port: int, done: Callable[[Any], bool]) -> dict[str, tuple[dict[str, str], float]]:
    """What the node serves, once it is as expected."""
    end = time.monotonic() + 120
    while not done(found := served(port)):
        assert time.monotonic() < end, found.keys()
        time.sleep(1)
    return found


class Worker:
    """An actor, as rank 0 is."""

    def tell(self) -> float:
        """CPU seconds of the longest call."""
        self.gauges = Gauges(RUN, "dino", "ada", 40)
        seen = {"monitor/knn": 0.5, "health/backbone_rank": 12.0, "knn/top9": 1.0, "mfu": 0.4, "memory/peak": 7.5}
        line = {"step": 10, "epoch": 0.5, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "images_per_s": 100.0} | seen
        line |= {"data_wait": 0.1, "bad_samples": 3, "skipped_steps": 0, "goodput": 0.9}
        lost = {"restarts": 1, "steps_repeated": 3, "seconds_lost": 9.0, "goodput": 0.9}
        collapse = {"step": 9, "kind": "collapse", "text": "all is one"}
        longest = 0.0
        for record in (line, lost, collapse, collapse, line | {"loss": float("nan")}):
            began = time.thread_time()
            self.gauges.update(record)
            longest = max(longest, time.thread_time() - began)
        return longest


def served(port: int) -> dict[str, tuple[dict[str, str], float]]:
    """Tags of ours and value of every metric of ours."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found = {}
    for name, tags, value in re.findall(r"^(ray_eagleray_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        found[name] = ({k: v for k, v in pairs.items() if k in (*TAGS, "kind")}, float(value))
    return found
