"""What must hold at each station of the mission, as functions of what was found there."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chaos import check as chaos

Pictures = Counter[tuple[int, int]]  # how often a picture is there, by the checksum of its file and its class
VARIED = ("optim.lr.value", "optim.batch", "method.momentum.value")


class Wrong(Exception):
    """A station is not as it should be: its text says in one line what was found and what was expected."""


def expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Wrong(f"{what}: found {found}, expected {expected}")


def whole_index(drawn: Pictures, shards: Mapping[str, Counter[int]], index: Mapping[str, Pictures]) -> None:
    """Every shard of the bucket, with exactly the pictures that are in it, and all pictures that were drawn."""
    expect("shards of the index", sorted(index), sorted(shards))
    for name, pictures in index.items():
        files = Counter[int]()
        for (crc, _), count in pictures.items():
            files[crc] += count
        expect(f"{name}: pictures that differ from the index", len((files - shards[name]) + (shards[name] - files)), 0)
    indexed = sum(index.values(), Counter[tuple[int, int]]())
    expect("pictures of the index", indexed.total(), drawn.total())
    expect("pictures of the index with another class", len((indexed - drawn) + (drawn - indexed)), 0)


def each_step_once(where: str, steps: Iterable[int], last: int) -> None:
    taken = Counter(steps)
    wrong = {s: taken[s] for s in sorted({*taken, *range(1, last + 1)}) if taken[s] != (1 <= s <= last)}
    first = next(iter(wrong), 0)
    if wrong:
        raise Wrong(f"{where}: found step {first} {wrong[first]} time(s), expected each of 1 to {last} once")


def finite(where: str, numbers: Mapping[str, Any]) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise Wrong(f"{where}: found {name} {value}, expected a finite number")


def as_planned(lines: Sequence[chaos.Line], wanted: chaos.Steps, last: int) -> None:
    """All ranks together were given the samples of the data plane's plan, in its order."""
    try:
        chaos.verify(lines, wanted, last)
    except AssertionError as e:
        why = str(e).split("\n")[0] or "steps or samples are missing"
        raise Wrong(f"samples of the ranks: found {why}; expected the order of the plan") from None


def survived(starts: Sequence[Mapping[str, Any]]) -> None:
    """The run began on both nodes, began again there without the rank that was killed, and went on without a node."""
    expect("ranks at each start, after a worker and then a node were killed", [s["ranks"] for s in starts], [2, 2, 1])


def one_tree(runs: Sequence[Mapping[str, Any]], trials: Sequence[Mapping[str, Any]]) -> None:
    """One parent has a child for each trial, with what was varied as parameters, of both methods.

    `runs` are those of MLflow, without that of the pretraining: id, parent, status, params and metrics of each."""
    parents = [r["id"] for r in runs if not r["parent"]]
    expect("runs of MLflow without a parent", len(parents), 1)
    children = [r for r in runs if r["parent"] == parents[0]]
    expect("children of the sweep in MLflow", len(children), len(trials))
    states = [r["status"] for r in children]
    stopped = sum(t["state"] == "stopped" for t in trials)
    expect("state of the sweep in MLflow", [r["status"] for r in runs if not r["parent"]], ["FINISHED"])
    expect(
        "states of the trials in MLflow",
        sorted(states),
        sorted(["KILLED"] * stopped + ["FINISHED"] * (len(trials) - stopped)),
    )
    expect("methods of the children", {r["params"].get("method.name") for r in children}, {"mocov3", "byol"})
    found = [tuple(r["params"].get(key) for key in VARIED) for r in children]
    expected = [tuple(str(t["values"].get(key)) for key in VARIED) for t in trials]
    expect(f"{', '.join(VARIED)} of the children", sorted(map(str, found)), sorted(map(str, expected)))
    for key, values in zip(VARIED, zip(*found, strict=True), strict=True):
        if len({*values}) < 2:
            raise Wrong(f"{key} of the children: found {values[0]} alone, expected several values")
    for r in children:
        finite(f"child {r['id']} in MLflow", {"monitor/knn": r["metrics"].get("monitor/knn")})


def evaluated(results: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> None:
    """Both protocols have finite numbers of the trained backbone and of the untrained one, and that of kNN is the one
    that the run has measured itself."""
    found = {(r["protocol"], r["untrained"]): r["numbers"] for r in results}
    expect("evaluations", sorted(found), [(p, u) for p in ("knn", "linear") for u in (False, True)])
    for (protocol, untrained), numbers in found.items():
        where = f"{protocol} of the {'un' * untrained}trained backbone"
        finite(where, {f"{protocol}/top1": numbers.get(f"{protocol}/top1"), **numbers})
    expect("knn/top1 of the trained backbone", found["knn", False]["knn/top1"], run.get("knn/top1"))


def same_features(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    """Features (B, D) that agree to 1e-4 of the largest."""
    expect("shape of the features", [len(row) for row in found], [len(row) for row in expected])
    largest = max(abs(x) for row in expected for x in row)
    difference = max(abs(a - b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))
    if not difference <= 1e-4 * largest:
        raise Wrong(f"features of timm's model: found a difference of {difference:.2g}, expected 1e-4 of {largest:.2g}")
