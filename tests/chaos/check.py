"""What a run was given, by its trace, against what it should have been given."""

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One rank's share of one step, as `trace/sitecustomize.py` writes it."""

    attempt: str  # equal for ranks that began together
    step: int  # from 1 on
    epoch: int
    rank: int
    rows: list[int]  # of every rank
    samples: list[str]  # shard:offset
    labels: list[int]


def trace(folder: Path) -> list[Line]:
    """All lines so far; the end of one that is being written is not there yet."""
    texts = [path.read_text() for path in folder.glob("rank-*.jsonl")]
    return [Line(**json.loads(line)) for text in texts for line in text.split("\n")[:-1]]


@dataclass(frozen=True)
class Step:
    """A global batch, in the order of its ranks."""

    epoch: int
    samples: list[str]
    labels: list[int]


Steps = dict[int, Step]


def steps(lines: Iterable[Line]) -> Steps:
    """What all ranks of some attempt were given; `verify` sees to it that attempts do not differ."""
    groups: dict[tuple[str, int], dict[int, Line]] = {}
    for line in lines:
        groups.setdefault((line.attempt, line.step), {})[line.rank] = line
    found = {}
    for (_, step), ranks in groups.items():
        shares = [ranks[r] for r in sorted(ranks)]
        if len(shares) == len(shares[0].rows):
            samples, labels = [s.samples for s in shares], [s.labels for s in shares]
            found[step] = Step(shares[0].epoch, list(itertools.chain(*samples)), list(itertools.chain(*labels)))
    return found


def verify(lines: Iterable[Line], wanted: Steps, last: int) -> None:
    """Every step up to `last` was given to all ranks, and each time that a rank was given one it was what is wanted."""
    lines = list(lines)
    for line in lines:
        step, begin = wanted[line.step], sum(line.rows[: line.rank])
        share = slice(begin, begin + line.rows[line.rank])
        where = f"step {line.step}, rank {line.rank} of {len(line.rows)}, attempt {line.attempt}"
        assert line.samples == step.samples[share], f"{where}: other samples"
        assert line.labels == step.labels[share], f"{where}: other labels"
    taken = steps(lines)
    assert sorted(taken) == list(range(1, last + 1))
    assert multiset(taken) == multiset({s: wanted[s] for s in range(1, last + 1)})


def multiset(taken: Steps) -> Counter[tuple[int, str]]:
    """How often each (epoch, sample) was given."""
    return Counter((step.epoch, sample) for step in taken.values() for sample in step.samples)


def with_stand_ins(wanted: Steps, broken: Collection[str], lanes: int) -> Steps:
    """The same with every broken sample replaced by the next good one in the reading order of its block.

    A shard must be one block, and the epochs must be whole: a lane's reading order is gathered from them.
    """
    labels = {s: label for step in wanted.values() for s, label in zip(step.samples, step.labels, strict=True)}
    out = {number: replace(step, samples=list(step.samples)) for number, step in wanted.items()}
    each = len(wanted[1].samples) // lanes
    for epoch in {step.epoch for step in wanted.values()}:
        numbers = [n for n in sorted(wanted) if wanted[n].epoch == epoch]
        for lane in range(lanes):
            places = [(n, row) for n in numbers for row in range(lane * each, (lane + 1) * each)]
            for _, run in itertools.groupby(places, key=lambda p: wanted[p[0]].samples[p[1]].partition(":")[0]):
                own = list(run)
                order = [wanted[n].samples[row] for n, row in own]
                for at, (n, row) in enumerate(own):
                    if order[at] in broken:
                        out[n].samples[row] = next(s for s in order[at:] + order[:at] if s not in broken)
    return {n: replace(step, labels=[labels[s] for s in step.samples]) for n, step in out.items()}
