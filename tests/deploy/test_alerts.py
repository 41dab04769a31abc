"""The alert rules and the board under Prometheus' own rule tests, on series as Ray writes them: each worker that Ray
starts has its own, which end with it. Each alert fires by its cause, and none in a healthy run of the same length."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.deploy import DEPLOY, TOOLS, load

PROMTOOL = shutil.which("promtool", path=f"{TOOLS}:{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (package prometheus of Debian)")
RUN, OTHER = "s3://bucket/runs/dino", "s3://elsewhere/runs/dino"  # two runs whose folders have one name
OURS = {"run": RUN, "user": "ada"}  # labels by which an alert finds its run and the person to tell
LONG = 150  # minutes
Values = dict[int, float]  # by minute; where one is missing, Ray has dropped the series


def series(name: str, labels: dict[str, str], values: Values) -> dict[str, str]:
    """A series as the rule tests write it."""
    text = [f"{values[t]:g}" if t in values else "stale" if t - 1 in values else "_" for t in range(LONG + 1)]
    inside = ",".join(f'{k}="{v}"' for k, v in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": " ".join(text)}


def process(run: str, worker: str, node: str) -> dict[str, str]:
    """What Ray says of a process that exports numbers of a run."""
    return {
        "run": run, "method": "dino", "user": "ada", "Component": "core_worker", "NodeAddress": node,
        "SessionName": "session", "Version": "2.60.0", "WorkerId": worker, "instance": f"{node}:8080", "job": "ray",
    }  # fmt: skip


# What rank 0 exports of a run that is well, by the minute of the run.
HEALTHY: dict[str, Callable[[int], float]] = {
    "step": lambda t: 10 * min(t, 100),
    "progress_ratio": lambda t: min(t, 100) / 100,  # an evaluation follows, in which no step is taken
    "planned_steps": lambda t: 1000,
    "restarts": lambda t: 0,
    "goodput_ratio": lambda t: 0.96,
    "lost_seconds": lambda t: 90 + 2 * t,
    "data_wait_ratio": lambda t: 0.04,
    "bad_samples": lambda t: t // 10,
    "loss": lambda t: 5 - t / 100,
}


def rank_zero(
    worker: str, when: Iterable[int], run: str = RUN, node: str = "10.0.0.7", **other: Callable[[int], float]
) -> list[dict[str, str]]:
    """The series of one worker of Ray that rank 0 was in, for the minutes `when` it lived."""
    about, minutes, numbers = process(run, worker, node), list(when), HEALTHY | other
    return [series(f"ray_eagleray_{name}", about, {t: value(t) for t in minutes}) for name, value in numbers.items()]


def command(when: Iterable[int], run: str = RUN) -> list[dict[str, str]]:
    """The series of the command of a run, which waits when there are no workers."""
    return [series("ray_eagleray_wanted_workers", process(run, "driver", "10.0.0.1"), dict.fromkeys(when, 8.0))]


def machine(
    node: str, *, head: bool = False, memory: float = 0.5, disk: float = 40.0, gpu: float = 93.0
) -> list[dict[str, str]]:
    """The series of a machine, whose state is as given from minute 40 on."""
    about = {"ip": node, "IsHeadNode": str(head).lower(), "instance": f"{node}:8080", "job": "ray"}
    state = {"mem_used": (0.5e9, memory * 1e9), "mem_total": (1e9, 1e9), "disk_utilization_percentage": (40.0, disk)}
    state |= {} if head else {"gpus_utilization": (93.0, gpu)}
    every = range(LONG + 1)
    return [series(f"ray_node_{k}", about, {t: v[t >= 40] for t in every}) for k, v in state.items()]


MACHINES = [*machine("10.0.0.1", head=True), *machine("10.0.0.7"), *machine("10.0.0.8")]
# It waits for machines at first, loses one at minute 50, continues on another, and evaluates when all steps are taken.
AGAIN: dict[str, Callable[[int], float]] = {"restarts": lambda t: 1, "lost_seconds": lambda t: 300 + 2 * t}
FIRST = rank_zero("a", range(8, 51))
WELL = [*command(range(132)), *FIRST, *rank_zero("b", range(54, 131), node="10.0.0.8", **AGAIN), *MACHINES]


def found(kind: str, worker: str, values: Values) -> dict[str, str]:
    return series("ray_eagleray_health_findings_total", process(RUN, worker, "10.0.0.7") | {"kind": kind}, values)


def lives(*ends: int, **numbers: Callable[[int, int], float]) -> list[dict[str, str]]:
    """Rank 0 in one worker of Ray after the other, each of which ends at a minute of `ends`, on machines that come and
    go. The numbers are functions of the life and the minute."""
    out, begin = [*command(range(LONG)), *MACHINES], 5
    for life, end in enumerate(ends):
        given = {name: lambda t, f=f, n=life: f(n, t) for name, f in numbers.items()}  # type: ignore[misc]
        out += rank_zero(f"w{life}", range(begin, end), node=f"10.0.0.{7 + life % 2}", **given)
        begin = end + 3
    return out


CAUSES: dict[str, Sequence[tuple[list[dict[str, str]], dict[str, str]]]] = {
    "RunStandsStill": [
        # A rank hangs: rank 0's worker is there, and so are its gauges.
        ([*command(range(LONG)), *rank_zero("a", range(5, LONG), step=lambda t: 10.0 * min(t, 60)), *MACHINES],
         OURS),
        # The machine was taken away and none came: nothing but the command is left. Another run of that name is well.
        ([*command(range(LONG)), *FIRST, *command(range(LONG), OTHER), *rank_zero("o", range(5, LONG), OTHER),
          *MACHINES], OURS),
        # There never was a machine.
        ([*command(range(LONG)), *MACHINES], OURS),
    ],
    "RunStartsAgainAndAgain": [
        # A node is lost every six minutes, and with it the worker whose gauge counted.
        (lives(10, 16, 22, 28, 34, LONG, restarts=lambda n, t: n), OURS),
        # The process of a rank dies in a worker that stays.
        (lives(LONG, restarts=lambda n, t: min(max(t - 30, 0), 5)), OURS),
    ],
    "RunLosesItsWork": [
        (lives(60, LONG, restarts=lambda n, t: n, lost_seconds=lambda n, t: 90 + 2 * t + 900 * n), OURS)
    ],
    "ReadersTooSlow": [(lives(LONG, data_wait_ratio=lambda n, t: 0.35 if t > 30 else 0.05), OURS)],
    "ModelUnwell": [
        # One finding, which is the first of its kind in that process; and one more of a kind that was there.
        ([*WELL, found("collapse", "a", dict.fromkeys(range(30, LONG), 1.0))], OURS | {"kind": "collapse"}),
        ([*WELL, found("nan", "a", {t: 1.0 + (t > 100) for t in range(LONG)})], OURS | {"kind": "nan"}),
    ],
    "BadSamples": [(lives(60, LONG, bad_samples=lambda n, t: 150 * n, restarts=lambda n, t: n), OURS)],
    "GpusIdle": [([*WELL, *machine("10.0.0.9", gpu=1.0)], {"instance": "10.0.0.9:8080"})],
    "NodeShortOfMemory": [([*WELL, *machine("10.0.0.9", memory=0.97)], {"instance": "10.0.0.9:8080"})],
    "HeadShortOfMemory": [([*WELL, *machine("10.0.0.9", head=True, memory=0.9)], {"instance": "10.0.0.9:8080"})],
    "DiskFull": [([*WELL, *machine("10.0.0.9", disk=93.0)], {"instance": "10.0.0.9:8080"})],
}  # fmt: skip


def prometheus_agrees(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Let Prometheus evaluate the rules over series, and compare what it finds with what is expected."""
    whole = {"rule_files": [str(DEPLOY / "prometheus/alerts.yaml")], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(whole, sort_keys=False, width=10**6))
    done = subprocess.run([str(PROMTOOL), "test", "rules", folder / "tests.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[:6000]


def expected(expression: str, *samples: dict[str, str], value: float = 1, at: int = LONG) -> dict[str, Any]:
    texts = ["{" + ", ".join(f'{k}="{v}"' for k, v in labels.items()) + "}" for labels in samples]
    return {
        "expr": expression,
        "eval_time": f"{at}m",
        "exp_samples": [{"labels": text, "value": value} for text in texts],
    }


FIRED = f'count by (alertname, run, user, instance, kind) (count_over_time(ALERTS{{alertstate="firing"}}[{LONG + 1}m]))'


def test_every_alert_has_a_cause():
    assert set(CAUSES) == {rule["alert"] for rule in load("prometheus/alerts.yaml")["groups"][0]["rules"]}


@pytest.mark.parametrize("name", CAUSES)
def test_an_alert_fires_by_its_cause_and_no_other_does(name: str, tmp_path: Path):
    tests = [
        {"interval": "1m", "input_series": given, "promql_expr_test": [expected(FIRED, {"alertname": name} | about)]}
        for given, about in CAUSES[name]
    ]
    prometheus_agrees(tmp_path, tests)


def test_no_alert_fires_in_a_healthy_run(tmp_path: Path):
    prometheus_agrees(tmp_path, [{"interval": "1m", "input_series": WELL, "promql_expr_test": [expected(FIRED)]}])


def test_an_alert_ends_with_its_cause(tmp_path: Path):
    """A run that waited for a machine has got one, and one that waited was stopped."""
    late = [*command(range(LONG)), *rank_zero("a", range(60, LONG)), *command(range(40), OTHER), *MACHINES]
    firing = 'count by (alertname, run) (ALERTS{alertstate="firing"})'
    both = [{"alertname": "RunStandsStill", "run": run} for run in (RUN, OTHER)]
    checks = [expected(firing, *both, at=30), expected(firing, both[0], at=45), expected(firing, at=65)]
    prometheus_agrees(tmp_path, [{"interval": "1m", "input_series": late, "promql_expr_test": checks}])


def test_a_run_is_one_line_of_the_board(tmp_path: Path):
    """Also where two of its workers have series at the same time, as one has died and the next has begun."""
    panels = json.loads((DEPLOY / "grafana/eagleray.json").read_text())["panels"]
    asked = [t["expr"].replace("$run", ".+").replace("$user", "a.a") for p in panels for t in p.get("targets", [])]
    given = [*rank_zero("a", range(60)), *rank_zero("b", range(58, LONG), **AGAIN), *rank_zero("o", range(LONG), OTHER)]
    given += [found("collapse", worker, dict.fromkeys(range(55, LONG), 1.0)) for worker in "ab"]
    known = {re.sub(r"\{.*", "", each["series"]) for each in given}
    checks = [
        expected(f"count by (run) ({e})", *[{"run": run} for run in (RUN, OTHER)[: 1 if "findings" in e else 2]], at=58)
        for e in asked
        if "ray_eagleray_" in e and set(re.findall(r"\bray_\w+", e)) <= known
    ]
    assert len(checks) > 8
    prometheus_agrees(tmp_path, [{"interval": "1m", "input_series": given, "promql_expr_test": checks}])
