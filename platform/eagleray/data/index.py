"""Indexes shards: reads every tar once and stores where its samples are, in one file per folder of shards."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.config.channels import Channels
from eagleray.config.source import Source
from eagleray.data import image_folder, index_file
from eagleray.data.file_names import readable
from eagleray.data.index_faults import lines_of_passed, unusable
from eagleray.data.index_file import NAME, SCHEMA, File, Spare, Tables, load_both, name
from eagleray.data.quarantine import BadSample, broken
from eagleray.data.tar_scan import scan
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.retry import PATIENCE
from eagleray.storage.store import Pattern

CACHED_SHARDS = 128  # shards whose rows a process keeps in memory
Urls = str | Sequence[str | Source]
Note = Callable[[str], None]
Tick = Callable[[int, int], None]  # shards done, shards in all
ScanAll = Callable[[Sequence[Blob]], Iterable[tuple[Blob, pa.Table]]]  # reads tars, in any order
THREADS = 8  # shards that are read at a time


def scan_shard(blob: Blob) -> tuple[Blob, pa.Table]:
    """Read a whole tar, and return the rows of its samples with it."""
    passed = Counter[str]()
    return blob, index_file.table_of(scan(blob, passed), passed)


def scan_here(blobs: Sequence[Blob]) -> Iterator[tuple[Blob, pa.Table]]:
    """Yield tars with their rows, in any order, several read at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(scan_shard, blobs)


class Rows(NamedTuple):
    """n neighbouring samples of one shard."""

    blob: Blob
    offset: NDArray[np.int64]  # (n,)
    size: NDArray[np.int64]  # (n,)
    label: NDArray[np.int64]  # (n,)
    crc: NDArray[np.uint32]  # (n,)


@functools.lru_cache(maxsize=CACHED_SHARDS)
def _numbers(file: File, group: int) -> dict[str, NDArray[Any]]:
    table = file.read(group, Rows._fields[1:]).slice(0, file.shards[group].usable)
    return {name: table[name].to_numpy() for name in table.column_names}


@functools.lru_cache(maxsize=CACHED_SHARDS)
def _keys(file: File, group: int) -> pa.ChunkedArray:
    return file.read(group, ["key"])["key"]


@dataclass(frozen=True)
class Index:
    """The N usable samples of S shards, in the order of the shards, and the B blocks that they are divided into.

    A block is a range of neighbouring samples that is read with one request.
    """

    shards: list[Blob]
    files: list[File]  # S: the index file of each shard
    sources: list[Source]  # S: the source that names each shard
    first: NDArray[np.int64]  # (S + 1,) first sample of each shard, and N
    starts: NDArray[np.int64]  # (B + 1,) first sample of each block, and N
    bad: list[BadSample]
    labelled: bool
    channels: Channels = ()  # as which its images are decoded; without any: red, green and blue

    def __len__(self) -> int:
        return int(self.first[-1])

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """The number of samples (B,) of each block."""
        return np.diff(self.starts)

    @property
    def repeats(self) -> NDArray[np.int64]:
        """Return the number of readings of each shard (S,) in an epoch."""
        return np.array([source.repeat for source in self.sources])

    def column(self, shard: int, names: Sequence[str]) -> pa.Table:
        """Return columns of the usable samples of a shard."""
        usable = int(self.first[shard + 1] - self.first[shard])
        return self.files[shard].read(self._group(shard), names).slice(0, usable)

    def _shard_of(self, sample: int) -> int:
        """Return the position in `shards` of a sample's shard."""
        return int(np.searchsorted(self.first, sample, "right")) - 1

    def rows(self, first: int, last: int) -> Rows:
        """Return the rows of the samples `first` to `last` (excluded), which lie in one shard."""
        s = self._shard_of(first)
        begin, end = first - self.first[s], last - self.first[s]
        numbers = _numbers(self.files[s], self._group(s))
        return Rows(self.shards[s], **{name: column[begin:end] for name, column in numbers.items()})

    def read(self, first: int, last: int, *, patience: float = PATIENCE) -> memoryview:
        """Return the bytes of the samples `first` to `last` (excluded), which lie in one shard.

        The bytes go from the start of the first image to the end of the last one. Raises UserError and Outage.
        """
        rows = self.rows(first, last)
        if image_folder.is_folder_blob(rows.blob):
            s = self._shard_of(first)
            paths = _keys(self.files[s], self._group(s)).slice(first - self.first[s], last - first).to_pylist()
            return image_folder.read_files(image_folder.address(rows.blob), paths, rows.size.tolist(), patience)
        begin, end = byte_range(rows)
        return store.store(rows.blob.url).read(rows.blob.url, begin, end - begin, tag=rows.blob.tag, patience=patience)

    def key(self, sample: int) -> str:
        """Return the WebDataset key of a sample, for a person: what is not UTF-8 or not printable is escaped."""
        s = self._shard_of(sample)
        return readable(str(self.files[s].read(self._group(s), ["key"])["key"][int(sample - self.first[s])]))

    def keys(self, first: int, last: int) -> list[str]:
        """Return the WebDataset keys of the samples `first` to `last` (excluded), as they are in the shards."""
        out: list[str] = []
        for s in range(self._shard_of(first), self._shard_of(last - 1) + 1):
            begin, end = max(first, int(self.first[s])), min(last, int(self.first[s + 1]))
            out += _keys(self.files[s], self._group(s)).slice(begin - int(self.first[s]), end - begin).to_pylist()
        return out

    def bad_sample(self, sample: int, reason: str) -> BadSample:
        """Describe a sample that turned out to be broken."""
        rows, s = self.rows(sample, sample + 1), self._shard_of(sample)
        extension = self.files[s].extension(self._group(s), int(sample - self.first[s]))
        reason += f" (its .{extension})" * bool(extension)
        return BadSample(image_folder.address(rows.blob), self.key(sample), int(rows.offset[0]), reason)

    @functools.cached_property
    def shard(self) -> NDArray[np.int32]:
        """The position in `shards` of each sample's shard (N,)."""
        return np.repeat(np.arange(len(self.shards), dtype=np.int32), np.diff(self.first))

    @functools.cached_property
    def offset(self) -> NDArray[np.int64]:
        """The first byte of each image in its shard (N,)."""
        return self._column("offset").to_numpy()

    @functools.cached_property
    def size(self) -> NDArray[np.int64]:
        """The bytes of each image (N,)."""
        return self._column("size").to_numpy()

    @functools.cached_property
    def label(self) -> NDArray[np.int64]:
        """The class of each sample (N,), -1 where it has none."""
        return self._column("label").to_numpy()

    @functools.cached_property
    def crc(self) -> NDArray[np.uint32]:
        """The CRC-32 of each image's bytes (N,)."""
        return self._column("crc").to_numpy()

    def _group(self, shard: int) -> int:
        return self.files[shard].groups[name(self.shards[shard])]

    def _column(self, name: str) -> pa.ChunkedArray:
        chunks = [chunk for s in range(len(self.shards)) for chunk in self.column(s, [name])[name].chunks]
        return pa.chunked_array(chunks, SCHEMA.field(name).type)


def byte_range(rows: Rows) -> tuple[int, int]:
    """Return where the first image begins and the last image ends, in bytes from the start of the shard."""
    return int(rows.offset[0]), int(rows.offset[-1] + rows.size[-1])


def open_index(
    urls: Urls,
    spare: Spare = None,
    *,
    note: Note = print,
    patience: float = PATIENCE,
    scan_all: ScanAll = scan_here,
    channels: Channels = (),
) -> Index:
    """Open the index of some shards or of local folders of images, which are decoded as these `channels`.

    Shards and folders without an index are indexed first, which `note` is called to report. The index file is stored
    beside the shards or, where nothing can be written there, in `spare`. `scan_all` reads the tars. Raises UserError
    when an indexed shard has changed or is missing, and when there is no usable image at all.
    """
    listed = list_data(urls, patience)
    known = dict(itertools.chain.from_iterable(_folders(listed, spare, note=note, scan_all=scan_all)))
    sources = listed.sources_of()
    blobs = sorted(known, key=lambda b: b.url)
    files = [known[b] for b in blobs]
    shards = [f.shards[f.groups[name(b)]] for b, f in zip(blobs, files, strict=True)]
    bad = [b for blob, file, shard in zip(blobs, files, shards, strict=True) if shard.bad for b in unusable(blob, file)]
    if not any(s.usable for s in shards):
        given = urls if isinstance(urls, str) else ", ".join(u if isinstance(u, str) else u.url for u in urls)
        raise UserError(f"{given}: no usable image in {len(blobs)} shard(s)" + (f"; {bad[0].reason}" if bad else ""))
    sizes = np.array([n for s in shards for n in s.blocks], dtype=np.int64)
    return Index(
        shards=blobs,
        files=files,
        sources=[sources[b.url] for b in blobs],
        first=np.r_[0, np.cumsum([s.usable for s in shards])].astype(np.int64),
        starts=np.r_[0, np.cumsum(sizes)].astype(np.int64),
        bad=bad,
        labelled=any(s.labelled for s in shards),
        channels=channels,
    )


def write_index(
    urls: Urls, *, note: Note = lambda _: None, tick: Tick | None = None, scan_all: ScanAll = scan_here
) -> list[tuple[str, int, int]]:
    """Index shards again, replacing any older index. `scan_all` reads the tars.

    Return the index's URL and the numbers of usable and of bad samples for every folder.
    """
    out = []
    for known in _folders(list_data(urls), None, note=note, again=True, tick=tick, scan_all=scan_all):
        mine = [f.shards[f.groups[name(b)]] for b, f in known]
        place = f"{store.parent(known[0][0].url)}/{NAME}"
        bad = sum(broken(unusable(b, f)) for b, f in known)
        out.append((place, sum(s.usable for s in mine), bad))
    return out


def save(folder: str, shards: Tables) -> str:
    """Write the index of a folder from one table of SCHEMA per shard, and return its URL."""
    tagged = ((replace(b, tag=store.store(b.url).tag(b)), table) for b, table in shards)
    return index_file.save(tagged, [f"{folder}/{NAME}"])


@dataclass(frozen=True)
class Listing:
    """The tars and the local folders of images that some URLs select, with one listing of every folder."""

    sources: list[Source]
    patterns: list[list[Pattern]]  # of each source
    folders: list[str]
    tars: dict[Pattern, list[Blob]]
    unread: dict[str, str]  # what is said of tars that are no shards, by folder

    @property
    def blobs(self) -> list[Blob]:
        """The tars, each once, in the order of their URLs."""
        return sorted({b.url: b for blobs in self.tars.values() for b in blobs}.values(), key=lambda b: b.url)

    def sources_of(self) -> dict[str, Source]:
        """Return the source of each shard, by its URL.

        Raises UserError when a shard is listed twice, and what is said of it differs.
        """
        out: dict[str, Source] = {}
        for source, patterns in zip(self.sources, self.patterns, strict=True):
            for pattern in patterns:
                images = f"{pattern.folder}/{image_folder.NAME}"
                for url in [b.url for b in self.tars[pattern]] if pattern in self.tars else [images]:
                    other = out.setdefault(url, source)
                    if replace(other, url="") != replace(source, url=""):
                        raise UserError(
                            f"{source.url}: repeat={source.repeat}, but {url} is also listed with another repeat "
                            "count, or with another where, weight, exclude or share"
                        )
        return out


def list_data(urls: Urls, patience: float = PATIENCE) -> Listing:
    """List the data that some URLs select. Raises UserError."""
    given = [urls] if isinstance(urls, str) else urls
    sources = [Source(url=u) if isinstance(u, str) else u for u in given]
    if not sources:
        raise UserError("no shards are given")
    patterns = [list(store.patterns(s.url, patience)) for s in sources]
    wholes = dict.fromkeys(p.folder for ps in patterns for p in ps if not p.name)
    folders = [folder for folder in wholes if image_folder.holds_images(folder)]
    unread = dict[str, str]()
    tars = store.select([p for ps in patterns for p in ps if p.name or p.folder not in folders], patience, unread)
    return Listing(sources, patterns, folders, tars, unread)


ShardFiles = list[tuple[Blob, File]]


def _folders(
    listed: Listing, spare: Spare, *, note: Note, again: bool = False, tick: Tick | None = None, scan_all: ScanAll
) -> Iterator[ShardFiles]:
    """Yield, for each folder, its shards, each with the index file that has its rows; shards without one are
    indexed."""
    for folder in listed.folders:
        yield [_folder_of_images(folder, spare, note=note, again=again, tick=tick)]
    for folder, tars in listed.unread.items():
        note(f"{folder}: not read: {tars}")
    globs = [p for p in listed.tars if p.is_glob]  # shards that are named are there
    by_folder = sorted(listed.blobs, key=lambda b: store.parent(b.url))
    for folder, group in itertools.groupby(by_folder, key=lambda b: store.parent(b.url)):
        with ThreadPoolExecutor(THREADS) as pool:  # a local file is opened for its tag
            mine = list(pool.map(lambda b: replace(b, tag=store.store(b.url).tag(b)), group))
        beside = f"{folder}/{NAME}"
        aside = index_file.aside(folder, spare)
        known = load_both(beside, aside, again)
        names = {name(b) for b in mine}
        gone = {n for n in known.keys() - names if any(p.folder == folder and p.matches(n) for p in globs)}
        if gone and not again:
            raise UserError(
                f"{folder}/{min(gone)}: is indexed, but no longer exists; `eagleray index {folder}` accepts that"
            )
        new = [b for b in mine if again or not _is_indexed(b, known)]
        if new or gone:
            note(f"indexing {len(new)} shards of {folder}")
            scanned = list(_counted(scan_all(new), len(new), tick))
            known |= load_both(beside, aside, again)  # and what others indexed meanwhile
            others, changed = known.keys() - names - gone, set(new)
            kept = ((_old_blob(n, known[n], folder), known[n].read(known[n].groups[n])) for n in others)
            same = ((b, _rows(b, known)) for b in mine if b not in changed)
            rows = itertools.chain(kept, same, scanned)
            index_file.save(rows, [u for u in (beside, aside) if u])
            known = load_both(beside, aside, again)
        if new and not again:  # `eagleray index` says more
            for line in lines_of_passed({name(b): known[name(b)].passed.get(name(b), Counter()) for b in new}):
                note(line)
        yield [(b, known[name(b)]) for b in mine]


def _folder_of_images(folder: str, spare: Spare, *, note: Note, again: bool, tick: Tick | None) -> tuple[Blob, File]:
    """Return a folder of images as one shard, with the index file that has its rows.

    New images are indexed. Raises UserError when an indexed image is gone or has another size.
    """
    beside, aside = f"{folder}/{NAME}", index_file.aside(folder, spare)
    listing = image_folder.list_images(folder)
    blob = image_folder.blob_of(folder, listing)
    known = load_both(beside, aside, again)
    if again or name(blob) not in known or _old_blob(name(blob), known[name(blob)], folder).tag != blob.tag:
        old = _rows(blob, known) if name(blob) in known and not again else None
        if old is not None and (what := image_folder.difference(old, listing)):
            raise UserError(f"{folder}/{what} since it was indexed; `eagleray index {folder}` accepts that")
        others = f"; not read: {listing.unread()}" if listing.others else ""
        note(f"indexing {len(listing.sizes)} images of {folder}{others}")
        rows = image_folder.scan_folder(folder, listing, old)
        total = len(listing.sizes)
        counted = (row for n, row in enumerate(rows, 1) if tick is None or tick(n, total) is None)
        index_file.save([(blob, index_file.table_of(counted))], [u for u in (beside, aside) if u])
        known = load_both(beside, aside, again)
    file = known[name(blob)]
    shard = file.shards[file.groups[name(blob)]]
    if shard.size != blob.size or shard.usable + shard.bad != len(listing.sizes):
        raise file.damaged(f"{shard.usable + shard.bad} images of {shard.size} bytes")
    return blob, file


def _rows(blob: Blob, known: dict[str, File]) -> pa.Table:
    file = known[name(blob)]
    return file.read(file.groups[name(blob)])


def _old_blob(name: str, file: File, folder: str) -> Blob:
    shard = file.shards[file.groups[name]]
    return Blob(f"{folder}/{name}", shard.size, shard.tag)


def _is_indexed(blob: Blob, known: dict[str, File]) -> bool:
    """Return whether a shard is indexed. Raises UserError when the shard has changed since it was indexed."""
    if name(blob) not in known:
        return False
    old = _old_blob(name(blob), known[name(blob)], store.parent(blob.url))
    comparable = old.tag.partition(":")[0] == blob.tag.partition(":")[0]
    if old.size != blob.size or (comparable and old.tag != blob.tag):
        raise UserError(
            f"{blob.url}: changed since it was indexed ({old.size} bytes {old.tag}, now {blob.size} {blob.tag}); "
            f"`eagleray index {store.parent(blob.url)}` accepts the new one"
        )
    return True


def _counted(tables: Tables, total: int, tick: Tick | None) -> Iterator[tuple[Blob, pa.Table]]:
    for done, item in enumerate(tables, 1):
        yield item
        if tick:
            tick(done, total)
