"""From a source of images to shards, their index and their card; begun anew anywhere, it ends with the same bytes.

What is to be done is written down before anything else: the items of the source and the options. A shard is a pure
function of both and of its number, and a note beside the items says that it is done. The card comes last.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data import index
from eagleray.data.index_file import NAME as INDEX
from eagleray.datasets import card
from eagleray.datasets.assignment import Order, cut
from eagleray.datasets.dedup import Hash, copies
from eagleray.datasets.pack import NOTES, Pack, note_name, noted, put_bytes, put_table
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Found, table
from eagleray.datasets.sources.job import Job
from eagleray.datasets.sources.known import SOURCES, find
from eagleray.datasets.stats import Census
from eagleray.storage import store
from eagleray.storage.ordered_map import ahead

T = TypeVar("T")
R = TypeVar("R")
Tick = Callable[[str, int, int], None]  # what is done, images so far, images in all
FILES = "files of the source"  # what they are must stay the same, as options must
KEY, MIB = "key", 2**20


class Run(Protocol):
    """How tasks are run: `map`, or Ray's way."""

    def __call__(self, function: Callable[[T], R], tasks: Iterable[T], /) -> Iterator[R]: ...


def prepare(job: Job, *, run: Run, command: str, note: Callable[[str], None], tick: Tick) -> dict[str, Any]:
    """Returns the card. Raises UserError, also for a destination that holds something else."""
    found = find(job)
    asked = job.options() | {FILES: _fingerprint(found)}
    plan = _plan(job, asked)
    if plan is not None and plan["done"]:
        _tidy(job.destination)
        note(f"{job.destination}: done already")
        return card.read(job.destination)
    if plan is None:
        note(f"listing {job.origin}")
        plan = _begin(job, found, asked)
    census = Census()
    items = _usable(_load(f"{job.destination}/{NOTES}/items.parquet"), census, job.origin)
    work = Work(job, found.column, run, note, tick)
    if job.dedup:
        items = work.unique(items, census)
    return _finish(job, plan, command, census, shards=work.write(items))


@dataclass(frozen=True)
class Work:
    """The two passes over the bytes of the source, in tasks whose notes say which are done."""

    job: Job
    column: str
    run: Run
    note: Callable[[str], None]
    tick: Tick

    @property
    def notes(self) -> str:
        return f"{self.job.destination}/{NOTES}"

    def unique(self, items: pa.Table, census: Census) -> pa.Table:
        """The items whose bytes no item before them has."""
        cuts = cut(items["size"].to_numpy(), self.job.size * MIB)
        pieces = [np.arange(a, b) for a, b in itertools.pairwise(cuts)]
        names = [Hash.name(n) for n in range(len(pieces))]
        self._do("hash", Hash(self.notes, self.column), items, pieces, names)
        digests = pa.concat_tables(ahead(lambda name: _load(f"{self.notes}/{name}"), names))
        first = copies(digests["digest"])
        here = np.arange(len(items))
        for row in np.flatnonzero(first != here):
            census.drop("exact duplicate", f"{items[KEY][row].as_py()} (of {items[KEY][int(first[row])].as_py()})")
        return items.filter(pa.array(first == here))

    def write(self, items: pa.Table) -> int:
        """Write the shards that are not there yet. Returns how many there are in all."""
        order = Order.of(items, size=self.job.size * MIB, seed=self.job.seed)
        pieces = [order.rows(n) for n in range(len(order))]
        self.note(f"{len(items):,} images, {len(pieces):,} shard(s)")
        pack = Pack(self.job.destination, self.column, self.job.max_side, self.job.min_side)
        self._do("write", pack, items, pieces, [note_name(n) for n in range(len(pieces))])
        return len(pieces)

    def _do(
        self,
        what: str,
        function: Callable[[tuple[int, bytes]], int],
        items: pa.Table,
        pieces: Sequence[NDArray[np.int64]],
        names: Sequence[str],
    ) -> None:
        """Run the tasks, each with its rows of the items, that have left no note of this name."""
        there = {b.url.rpartition("/")[2] for b in files.directly(self.notes + "/")}
        missing = [n for n, name in enumerate(names) if name not in there]
        done = len(items) - sum(len(pieces[n]) for n in missing)
        if done:
            self.note(f"{what}: {done:,} images were done before")
        if not missing:
            return
        self.tick(what, done, len(items))
        whole = items.combine_chunks()  # taking rows out of many chunks is 50 times slower
        for count in self.run(function, ((n, packed(whole.take(pieces[n]))) for n in missing)):
            done += count
            self.tick(what, done, len(items))


def packed(items: pa.Table) -> bytes:
    """Items to send to another process."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, items.schema) as writer:
        writer.write_table(items)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _fingerprint(found: Found) -> str:
    """Of names, sizes and, on S3, contents."""
    digest = hashlib.blake2b(digest_size=16)
    for blob in found.files:
        digest.update(f"{blob.url}\0{blob.size}\0{blob.tag}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _plan(job: Job, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier command wrote down, or None. Raises UserError when that was another one."""
    done = card.find(job.destination)
    if done is not None:
        plan = {"options": done["options"], "done": True}
    else:
        try:
            plan = json.loads(bytes(store.store(job.destination).get(f"{job.destination}/{NOTES}/plan.json")))
        except FileNotFoundError:
            _check_empty(job.destination)
            return None
    for name, value in asked.items():
        before = plan["options"].get(name)
        if before != value and name == FILES:
            raise UserError(f"{job.destination}: {job.origin} has changed since it was begun; give another folder")
        if before != value:
            raise UserError(
                f"{job.destination}: was begun with {name} {before or 'not given'}, not {value or 'not given'}; "
                "give the same options, or another folder"
            )
    return plan  # type: ignore[no-any-return]


def _check_empty(destination: str) -> None:
    if any(b.url.endswith(".tar") for b in files.directly(destination + "/")):
        raise UserError(f"{destination}: holds shards already; give another folder, or delete them first")


def _begin(job: Job, found: Found, asked: dict[str, Any]) -> dict[str, Any]:
    """Write down what is to be done. The plan comes after the items, so where it is, they are whole."""
    listing = found.listing()
    items = _own_keys(table(listing.items))
    plan = {"options": asked, "done": False, "classes": list(listing.classes)}
    put_table(f"{job.destination}/{NOTES}/items.parquet", items)
    put_bytes(f"{job.destination}/{NOTES}/plan.json", json.dumps(plan).encode())
    return plan


def _own_keys(items: pa.Table) -> pa.Table:
    """The same items, where of equal keys all but the first get `~2`, `~3`, ... at their ends."""
    keys = items[KEY]
    while pc.count_distinct(keys).as_py() < len(keys):
        counts = pc.value_counts(keys)
        repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        names, times = keys.to_numpy().copy(), dict.fromkeys(repeated.to_pylist(), 0)
        for row in np.flatnonzero(pc.is_in(keys, repeated).to_numpy()):
            name = names[row]
            times[name] += 1
            names[row] = name if times[name] == 1 else f"{name}~{times[name]}"
        keys = pa.chunked_array([pa.array(names, keys.type)])
    return items.set_column(0, KEY, keys)


def _load(url: str) -> pa.Table:
    return pq.read_table(pa.BufferReader(store.store(url).get(url)))


def _usable(items: pa.Table, census: Census, origin: str) -> pa.Table:
    for row in items.filter(pc.is_valid(items["reason"])).select([KEY, "reason"]).to_pylist():
        census.drop(row["reason"], row[KEY])
    good = items.filter(pc.is_null(items["reason"]))
    if not len(good):
        why = f"; {len(items)} listed, {next(iter(census.dropped))}" if len(items) else ""
        raise UserError(f"{origin}: holds no image that can be used{why}")
    return good


def _finish(job: Job, plan: dict[str, Any], command: str, census: Census, shards: int) -> dict[str, Any]:
    """Index, card, and away with the notes. The index is made of these: no image is read again."""
    listed, labels, parts = sum(d.count for d in census.dropped.values()), set(), []
    for part in ahead(lambda n: noted(f"{job.destination}/{NOTES}/{note_name(n)}"), range(shards)):
        census.add(part.census)
        listed += part.census.images + sum(d.count for d in part.census.dropped.values())
        labels |= set(pc.unique(part.rows["label"]).to_pylist()) - {-1}
        if part.blob.size:
            parts.append(part)
    if not parts:
        worst = max(census.dropped, key=lambda r: census.dropped[r].count)
        raise UserError(f"{job.destination}: no image is left of {listed}; most were dropped for: {worst}")
    index.save(job.destination, [(p.blob, p.rows) for p in parts])
    done = {
        "source": job.source,
        "command": command,
        "licence": SOURCES[job.source].licence,
        "listed": listed,
        "classes": len(labels),
        "shards": len(parts),
        **census.plain(),
        "options": plan["options"],
        "class_names": plan["classes"],
    }
    card.write(job.destination, done)
    _tidy(job.destination)
    return done


def _tidy(destination: str) -> None:
    """Delete the notes, and what a killed process had not finished writing."""
    place = store.store(destination)
    for blob in files.below(f"{destination}/{NOTES}"):
        place.delete(blob.url)
    if not destination.startswith("s3:"):
        shutil.rmtree(store.local(f"{destination}/{NOTES}"), ignore_errors=True)
    for blob in files.directly(destination + "/"):
        if blob.url.rpartition("/")[2].startswith((".shard-", f".{INDEX}.", f".{card.NAME}.")):
            place.delete(blob.url)
