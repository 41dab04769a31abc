"""Make shards, their index and their card from a source of images.

An interrupted preparation can be continued and ends with the same bytes. First the plan is written: the options and the
items (the images of the source). Each shard is a pure function of the plan and the shard's index. A finished shard
leaves a small file, its note, beside the plan. The card is written last. Each file is on the disk before the next one
is written. A shard whose size or checksum differs from its note is written again."""

import contextlib
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
from numpy.typing import NDArray

from eagleray.base.errors import Busy, UserError, explained
from eagleray.base.files import NO_JSON, lock_folder, writing
from eagleray.data import index, index_file
from eagleray.data.index_file import NAME as INDEX
from eagleray.datasets import card
from eagleray.datasets.assignment import ShardAssignment, cut_evenly
from eagleray.datasets.catalogue import SOURCES, find
from eagleray.datasets.dedup import HashTask, first_copies
from eagleray.datasets.pack import NOTES, PackTask, get_table, note_name, put_table, read_note
from eagleray.datasets.shards import check_empty
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import BATCH, table
from eagleray.datasets.sources.source import PrepareOptions, Read, SourceFiles
from eagleray.datasets.stats import ImageStats
from eagleray.storage import store
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.shard_names import is_shard

T = TypeVar("T")
R = TypeVar("R")
Tick = Callable[[str, int, int], None]  # name of the pass, images done, images in all
FILES = "files of the source"  # key in a plan's options for the digest of the source's files; it may not change either
KEY, MIB = "key", 2**20


class Run(Protocol):
    """A function that runs tasks and yields their results in any order: `map`, or its equivalent on Ray."""

    def __call__(self, function: Callable[[T], R], tasks: Iterable[T], /) -> Iterator[R]: ...


def prepare(
    options: PrepareOptions, *, run: Run, command: str, note: Callable[[str], None], tick: Tick
) -> dict[str, Any]:
    """Write the shards of a source, their index and their card. Return the card.

    Raises UserError when the source cannot be read, or when the destination holds other shards."""
    store.check_writable(options.destination)
    if options.channels and options.max_side:
        raise UserError(f"--max-side {options.max_side}: makes JPEGs, which have no {options.channels} --channels")
    source = find(options)
    identity = options.identity() | {FILES: _fingerprint(source)}
    _read_plan(options, identity)  # errors must come before anything is written
    with _alone(options.destination, note):
        plan = _read_plan(options, identity)
        if plan is not None and plan["done"]:
            done = card.read(options.destination)
            _check_shards(options.destination, done["shards"])
            _delete_notes(options.destination)
            note(f"{options.destination}: already complete")
            return done
        if plan is None:
            note(f"listing {options.origin}{f'; not read: {source.unread}' if source.unread else ''}")
            plan = _write_plan(options, source, identity, note)
        stats = ImageStats()
        items = _drop_unusable(_load(f"{options.destination}/{NOTES}/{plan['items']}"), stats, options.origin)
        passes = TaskPasses(options, source.read, run, note, tick, _digest(identity))
        if options.dedup:
            items = passes.unique(items, stats)
        return _finish(options, identity, plan, command, stats, shards=passes.write(items))


@contextlib.contextmanager
def _alone(destination: str, note: Callable[[str], None]) -> Iterator[None]:
    """A context that locks a local destination. Raises UserError if another command on this machine has locked it."""
    notes = store.folder_of(f"{destination}/{NOTES}")
    if notes is None:  # an object store has no locks, but `_read_plan` notices the plan of another command
        yield
        return
    there = notes.parent.exists()
    try:
        notes.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(notes)
    except Busy:
        raise UserError(f"{destination}: another `eagleray prepare` is at work there") from None
    except UserError:  # the file system may have no locks
        note(f"{destination}: cannot be locked; do not start a second command for it")
        yield
        return
    except OSError as e:
        raise UserError(f"{destination}: cannot be written: {e.strerror}") from None
    with lock:
        try:
            yield
        finally:
            if notes.is_dir() and [p.name for p in notes.iterdir()] == [".lock"]:  # there is no plan yet
                shutil.rmtree(notes)
                if not there:
                    notes.parent.rmdir()


@dataclass(frozen=True)
class TaskPasses:
    """The two passes over the images of a source: finding duplicates and writing shards.

    Each pass is divided into tasks. A finished task leaves a small file, its note, so that it is not run again."""

    options: PrepareOptions
    read: Read
    run: Run
    note: Callable[[str], None]
    tick: Tick
    plan: str  # digest of the plan

    @property
    def notes(self) -> str:
        return f"{self.options.destination}/{NOTES}"

    def unique(self, items: pa.Table, stats: ImageStats) -> pa.Table:
        """Return the items without duplicates. Of images with the same bytes, the first is kept, and the others are
        counted as dropped in `stats`."""
        cuts = cut_evenly(items["size"].to_numpy(), self.options.size * MIB)
        pieces = [np.arange(a, b) for a, b in itertools.pairwise(cuts)]
        task = HashTask(self.notes, self.read, self.plan)
        finished = [digests is not None for digests in ordered_map(task.digests, range(len(pieces)))]
        self._run_missing("hash", task, items, pieces, finished)
        digests = pa.concat_tables(
            ordered_map(lambda n: _present(task.digests(n), self.options.destination), range(len(pieces)))
        )
        first = first_copies(digests["digest"])
        rows = np.arange(len(items))
        for row in np.flatnonzero(first != rows):
            stats.drop("exact duplicate", f"{items[KEY][row].as_py()} (of {items[KEY][int(first[row])].as_py()})")
        return items.filter(pa.array(first == rows))

    def write(self, items: pa.Table) -> int:
        """Write the shards that have not been written yet. Return the number of all shards."""
        assignment = ShardAssignment.shuffle(items, size=self.options.size * MIB, seed=self.options.seed)
        pieces = [assignment.rows(n) for n in range(len(assignment))]
        self.note(f"{len(items):,} images, {len(pieces):,} shard(s)")
        pack = PackTask(
            self.options.destination,
            self.read,
            self.options.max_side,
            self.options.min_side,
            self.plan,
            self.options.channels,
        )
        sizes = {b.url: b.size for b in files.list_folder(self.options.destination + "/")}
        noted = {b.url.rpartition("/")[2] for b in files.list_folder(self.notes + "/")}
        finished = ordered_map(lambda n: note_name(n) in noted and pack.is_done(n, sizes), range(len(pieces)))
        self._run_missing("write", pack, items, pieces, list(finished))
        return len(pieces)

    def _run_missing(
        self,
        name: str,
        function: Callable[[tuple[int, bytes]], int],
        items: pa.Table,
        pieces: Sequence[NDArray[np.int64]],
        finished: Sequence[bool],
    ) -> None:
        """Run the tasks that are not finished. Task i receives the rows `pieces[i]` of the table `items`."""
        missing = [n for n, done in enumerate(finished) if not done]
        done = len(items) - sum(len(pieces[n]) for n in missing)
        if done:
            self.note(f"{name}: {done:,} images were done before")
        if not missing:
            return
        self.tick(name, done, len(items))
        whole = items.combine_chunks()  # taking rows from many chunks is 50 times slower
        for count in self.run(function, ((n, serialize(whole.take(pieces[n]))) for n in missing)):
            done += count
            self.tick(name, done, len(items))


def serialize(items: pa.Table) -> bytes:
    """Serialize items so that they can be sent to another process."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, items.schema) as writer:
        writer.write_table(items)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _fingerprint(source: SourceFiles) -> str:
    """Return a digest of the names and sizes of the source's files, and of the tags of files in a store."""
    digest = hashlib.blake2b(digest_size=16)
    for blob in source.files:
        digest.update(f"{blob.url}\0{blob.size}\0{blob.tag}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _read_plan(options: PrepareOptions, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the plan that an earlier command left in the destination, or None if there is none.

    Raises UserError when that command had other options or other source files."""
    done = card.find(options.destination)
    if done is not None:
        plan = {"options": done.get("options"), "done": True}
    else:
        url = f"{options.destination}/{NOTES}/plan.json"
        text = store.find(url)
        if text is None:
            check_empty(options.destination)
            return None
        again = f"{url}: damaged; delete {options.destination}, and the same command begins again"
        with explained(again, *NO_JSON, why=False):
            plan = json.loads(text)
            plan = {name: plan[name] for name in ("options", "done", "classes", "items")}
    if not isinstance(plan["options"], dict):
        raise UserError(
            f"{options.destination}: its shards were not written by `eagleray prepare`; give another folder"
        )
    for name in {**identity, **plan["options"]}:
        before, value = plan["options"].get(name), identity.get(name)
        if before != value and name == FILES:
            raise UserError(
                f"{options.destination}: the files of {options.origin} have changed since this preparation began; "
                "give another folder"
            )
        if before != value:
            raise UserError(
                f"{options.destination}: was begun with {_setting(name, before)}, now {_setting(name, value)}; "
                "give the same options, or another folder"
            )
    return plan  # type: ignore[no-any-return]


def _setting(name: str, value: Any) -> str:
    return f"{name} {value}" if value or name == "--seed" else f"no {name}"


def _check_shards(destination: str, shards: int) -> None:
    """Raise UserError when shards of a finished preparation are missing or differ in size from their index."""
    there = {b.url.rpartition("/")[2]: b.size for b in files.list_folder(destination + "/")}
    known = index_file.load(f"{destination}/{INDEX}", again=False)
    sizes = {name: file.shards[file.groups[name]].size for name, file in known.items()}
    wrong = [name for name in sizes if there.get(name) != sizes[name]]
    tars = sum(map(is_shard, there))
    if wrong or tars < shards:
        what = f"{shards - tars} of {shards} shards are missing"
        what = f"{wrong[0]} {'has another size' if wrong[0] in there else 'is missing'}" if wrong else what
        raise UserError(f"{destination}: was complete, but {what}; put it back, or delete the folder to begin again")


def _write_plan(
    options: PrepareOptions, source: SourceFiles, identity: dict[str, Any], note: Callable[[str], None]
) -> dict[str, Any]:
    """List the items of the source, write them, and then write the plan.

    In this order, the items are complete whenever a plan exists."""
    listing = source.listing()
    items = _unique_keys(table(listing.items))
    for line in filter(None, (listing.note, *listing.found())):
        note(line)
    name = f"items-{_digest(identity)}.parquet"  # a command with other options writes to another file
    plan = {"options": identity, "done": False, "classes": list(listing.classes), "items": name}
    url = f"{options.destination}/{NOTES}/plan.json"
    put_table(f"{options.destination}/{NOTES}/{name}", items)
    with writing(url):
        store.store(url).create(url, json.dumps(plan).encode())  # creates it only once, also if two commands run
    return _present(_read_plan(options, identity), options.destination)


def _unique_keys(items: pa.Table) -> pa.Table:
    """Make the keys of items unique: append `~2`, `~3`, ... to the second, third, ... of equal keys."""
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


def _digest(identity: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()


def _present(thing: T | None, destination: str) -> T:
    """Return `thing`, read from a file that this command found or wrote before. Raises UserError if it is None, because
    another command has deleted or replaced the file."""
    if thing is None:
        raise UserError(f"{destination}: another command has changed it meanwhile; run this one again")
    return thing


def _load(url: str) -> pa.Table:
    """Return the table that `put_table` stored. Raises UserError when it is damaged."""
    table = get_table(url)
    if table is None:
        folder = store.parent(store.parent(url))
        raise UserError(f"{url}: damaged; delete {folder}, and the same command begins again")
    return table


def _drop_unusable(items: pa.Table, stats: ImageStats, origin: str) -> pa.Table:
    """Return the items that have no reason to be dropped, and count the others in `stats` by reason.

    Raises UserError when no item is usable."""
    dropped = items.filter(pc.is_valid(items["reason"])).select([KEY, "reason"])
    for batch in dropped.to_batches(max_chunksize=BATCH):  # nearly all may be dropped, so memory is bounded by batches
        for row in batch.to_pylist():
            stats.drop(row["reason"], row[KEY])
    usable = items.filter(pc.is_null(items["reason"]))
    if not len(usable):
        why = (
            f"; all {len(items)} listed image(s) were dropped, for example because: {next(iter(stats.dropped))}"
            if len(items)
            else ""
        )
        raise UserError(f"{origin}: holds no usable image{why}")
    return usable


def _finish(
    options: PrepareOptions,
    identity: dict[str, Any],
    plan: dict[str, Any],
    command: str,
    stats: ImageStats,
    shards: int,
) -> dict[str, Any]:
    """Write the index and the card from the notes of the shards, without reading images again, and delete the notes."""
    listed, labels, notes = sum(d.count for d in stats.dropped.values()), set(), []
    _read_plan(options, identity)  # another command may have written another plan
    urls = [f"{options.destination}/{NOTES}/{note_name(n)}" for n in range(shards)]
    for intact in ordered_map(lambda url: read_note(url, _digest(identity)), urls):
        note = _present(intact, options.destination)
        stats.add(note.stats)
        listed += note.stats.images + sum(d.count for d in note.stats.dropped.values())
        labels |= set(pc.unique(note.rows["label"]).to_pylist()) - {-1}
        if note.blob.size:
            notes.append(note)
    if not notes:
        worst = max(stats.dropped, key=lambda r: stats.dropped[r].count)
        raise UserError(
            f"{options.destination}: all {listed} listed image(s) were dropped; the most frequent reason: {worst}"
        )
    index.save(options.destination, [(n.blob, n.rows) for n in notes])
    done = {
        "source": options.source,
        "command": command,
        "licence": SOURCES[options.source].licence,
        "listed": listed,
        "classes": len(labels),
        "shards": len(notes),
        **stats.to_json(),
        "options": plan["options"],
        "class_names": plan["classes"],
    }
    card.write(options.destination, done)
    _delete_notes(options.destination)
    return done


def _delete_notes(destination: str) -> None:
    """Delete the notes of finished tasks, and the incomplete files of a killed process."""
    storage = store.store(destination)
    notes = files.list_tree(f"{destination}/{NOTES}")
    for _ in ordered_map(lambda blob: storage.delete(blob.url), notes):  # one after the other may take an hour
        pass
    if folder := store.folder_of(f"{destination}/{NOTES}"):
        shutil.rmtree(folder, ignore_errors=True)
    for blob in files.list_folder(destination + "/"):
        if blob.url.rpartition("/")[2].startswith((".shard-", f".{INDEX}.", f".{card.NAME}.")):
            storage.delete(blob.url)
