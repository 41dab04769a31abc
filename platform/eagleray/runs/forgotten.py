"""Keep the list of images that a run has forgotten. The run reads other images in their place, as for broken images.

`forgotten.jsonl` has a line for each image. Before it is written, all that these images have changed is removed from
the run, such as the checkpoints after their first use. So no remaining step of the run has read them."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eagleray.base.files import parse_lines
from eagleray.data import index_file
from eagleray.data.image_folder import whole
from eagleray.data.index import Index
from eagleray.data.quarantine import Quarantine
from eagleray.data.sample_uses import broken_samples, with_keys
from eagleray.runs import layout
from eagleray.runs.run_store import run_store

Lines = list[dict[str, Any]]
KINDS = {"shard": str, "key": str, "step": int}  # types of the values of a line


def read_forgotten(out: str) -> Lines:
    """Return the lines of a run's forgotten.jsonl: shard and key of an image, and the step from which the run went on
    without it. Invalid lines are left out, as a run's folder may come from a stranger."""
    lines = parse_lines((run_store(out).get(layout.FORGOTTEN) or "").split("\n"))
    return [line for line in lines if {name: type(line.get(name)) for name in KINDS} == KINDS]


def write_forgotten(out: str, lines: Lines) -> None:
    """Replace a run's forgotten.jsonl. Raises OSError when it cannot be written."""
    run_store(out).put(layout.FORGOTTEN, "".join(json.dumps(line) + "\n" for line in lines))


def lines_of(index: Index, samples: Iterable[int], step: int) -> Lines:
    """Return the lines of forgotten.jsonl for `samples`, without which the run goes on from `step`."""
    return [{"shard": _name(index, shard), "key": key, "step": step} for _, shard, key in with_keys(index, samples)]


def samples_of(index: Index, lines: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """Return the samples that `lines` name by their shard's file name and their key, so shards may have been moved."""
    wanted = defaultdict[str, list[str]](list)
    for line in lines:
        wanted[line["shard"]].append(line["key"])
    found: list[int] = []
    for shard in range(len(index.shards)) if wanted else ():
        if keys := wanted.get(_name(index, shard)):
            there = pc.is_in(index.column(shard, ["key"])["key"], value_set=pa.array(keys, pa.string())).to_numpy()
            found += (np.flatnonzero(there) + index.first[shard]).tolist()
    return frozenset(found)


def unread_samples(index: Index, folder: Path) -> frozenset[int]:
    """Return the samples that a run does not read: those it has forgotten, and those in the quarantine of its folder on
    this machine."""
    listed = Quarantine(folder / layout.QUARANTINE, samples=1, limit=1).bad.values()
    return index.forgotten.union(broken_samples(index, listed))


def told(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield, for each step from which a run went on after forgetting images, a text with their number."""
    for step, count in sorted(Counter(line["step"] for line in lines).items()):
        yield f"{count} image{'s' * (count > 1)}, training went on from step {step}"


def _name(index: Index, shard: int) -> str:
    """Return a shard's file name. For a part of a folder of images it is the folder's, as paths in it are unique."""
    return index_file.name(whole(index.shards[shard]))
