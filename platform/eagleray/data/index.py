"""Indexes shards: reads every tar once and stores where its samples are, in one file per folder of shards."""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.config.channels import Channels
from eagleray.config.source import Source
from eagleray.data import image_folder, index_file
from eagleray.data.file_names import readable
from eagleray.data.image_folder import Images
from eagleray.data.image_list import Read
from eagleray.data.index_faults import lines_of_passed, unusable
from eagleray.data.index_file import NAME, SCHEMA, File, Note, ShardFiles, Spare, Tables, Tick, load_both, name
from eagleray.data.kinds import Means, Rows, as_before, check_columns, chosen, kind_of
from eagleray.data.quarantine import BadSample, broken
from eagleray.data.stamps import Stamp
from eagleray.data.stamps import stamps as stamps_of
from eagleray.data.unchanged import content_tag, remember, tagged
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.retry import PATIENCE, answering
from eagleray.storage.shard_names import is_parquet
from eagleray.storage.url_patterns import Pattern

CACHED_SHARDS = 128  # shards whose rows a process keeps in memory
Urls = str | Sequence[str | Source]
ScanAll = Callable[[Iterable[Any]], Iterable[tuple[Any, Any]]]  # yields `scan_shard(item)` of all items, in any order
THREADS = 8  # shards that are read at a time
UNITS = 2  # groups of images that are read at a time, each with several requests


def scan_shard(blob: Blob | Images) -> tuple[Blob, pa.Table] | tuple[Images, list[Read]]:
    """Read a whole shard, or a group of a folder's images. Return a shard with the table of its samples; a local one
    gets a tag with its checksum, by which a change is noticed later. Return a group with its images, to which checksums
    or the reasons why they cannot be used are added."""
    if isinstance(blob, Images):
        return blob, blob.read()
    blob = replace(blob, tag=content_tag(blob)) if store.folder_of(blob.url) else blob
    return blob, kind_of(blob).scan(blob)


def scan_here(blobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield what `scan_shard` returns for each shard or each group of images. Several are read at a time."""
    for kind, some in itertools.groupby(blobs, key=type):
        yield from ordered_map(scan_shard, some, width=UNITS if kind is Images else THREADS)


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

    A block is a range of neighbouring samples that is read with one request."""

    shards: list[Blob]
    files: list[File]  # (S,) the index file of each shard
    sources: list[Source]  # (S,) the source that names each shard
    first: NDArray[np.int64]  # (S + 1,) first sample of each shard, and N
    starts: NDArray[np.int64]  # (B + 1,) first sample of each block, and N
    bad: list[BadSample]
    labelled: bool
    channels: Channels = ()  # the channels of its decoded images; empty: red, green and blue
    forgotten: frozenset[int] = frozenset()  # samples that a run must not read any more and replaces like broken ones

    def __reduce__(self) -> Any:
        return Index, tuple(getattr(self, f.name) for f in fields(self))  # cached columns are not copied

    def __len__(self) -> int:
        return int(self.first[-1])

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """The number of samples (B,) of each block."""
        return np.diff(self.starts)

    @property
    def repeats(self) -> NDArray[np.int64]:
        """Return how often each shard (S,) is read in an epoch."""
        return np.array([source.repeat for source in self.sources])

    @property
    def packed(self) -> int:
        """The number of shards that are files, not parts of a folder of images."""
        return sum(not image_folder.is_folder_blob(blob) for blob in self.shards)

    def column(self, shard: int, names: Sequence[str]) -> pa.Table:
        """Return columns of the usable samples of a shard."""
        usable = int(self.first[shard + 1] - self.first[shard])
        return self.files[shard].read(self._group(shard), names).slice(0, usable)

    def classes(self, shard: int) -> list[str] | None:
        """Return the class names that a Parquet file declares, perhaps none, or None for a shard of another kind."""
        known = self.files[shard].shards[self._group(shard)].parquet
        return known["classes"] if known else None

    def _shard_of(self, sample: int) -> int:
        """Return the index in `shards` of a sample's shard."""
        return int(np.searchsorted(self.first, sample, "right")) - 1

    def rows(self, first: int, last: int) -> Rows:
        """Return the rows of the samples `first` to `last` (excluded), which lie in one shard."""
        s = self._shard_of(first)
        begin, end = first - self.first[s], last - self.first[s]
        numbers = _numbers(self.files[s], self._group(s))
        return Rows(self.shards[s], **{name: column[begin:end] for name, column in numbers.items()})

    def read(self, first: int, last: int, *, patience: float = PATIENCE, **more: Any) -> memoryview:
        """Return the bytes of the samples `first` to `last` (excluded), which lie in one shard, from the start of the
        first image to the end of the last one. Raises UserError and Outage.

        `more` may be `each` and `stale` of `Means`. By default, several requests are concurrent."""
        rows, s = self.rows(first, last), self._shard_of(first)
        shard = self.files[s].shards[self._group(s)]
        return kind_of(rows.blob).read(rows, Means(shard, lambda: self.keys(first, last), patience, **more))

    def key(self, sample: int) -> str:
        """Return the WebDataset key of a sample for a message, with escapes for what is not UTF-8 or not printable."""
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
        """Return the record of a sample that turned out to be broken."""
        rows, s = self.rows(sample, sample + 1), self._shard_of(sample)
        extension = self.files[s].extension(self._group(s), int(sample - self.first[s]))
        reason += f" (its .{extension})" * bool(extension)
        return BadSample(image_folder.address(rows.blob), self.key(sample), int(rows.offset[0]), reason)

    @functools.cached_property
    def shard(self) -> NDArray[np.int32]:
        """The index in `shards` of each sample's shard (N,)."""
        return np.repeat(np.arange(len(self.shards), dtype=np.int32), np.diff(self.first))

    @functools.cached_property
    def offset(self) -> NDArray[np.int64]:
        """The offset of each image's first byte in its shard (N,)."""
        return self._column("offset").to_numpy()

    @functools.cached_property
    def size(self) -> NDArray[np.int64]:
        """The size of each image in bytes (N,)."""
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


def open_index(
    urls: Urls,
    spare: Spare = None,
    *,
    note: Note = print,
    patience: float = PATIENCE,
    scan_all: ScanAll = scan_here,
    channels: Channels = (),
    tick: Tick | None = None,
) -> Index:
    """Open the index of some shards or folders of images, which are decoded as these `channels`.

    Shards and folders without an index are indexed first: `scan_all` reads them, `note` is called with messages, and
    `tick` with the progress. The index file is stored beside the shards or, where nothing can be written there, in
    `spare`. Raises UserError when an indexed shard has changed or is missing, and when no image is usable."""
    listed = list_data(urls, patience)
    known = dict(itertools.chain.from_iterable(_folders(listed, spare, note=note, tick=tick, scan_all=scan_all)))
    sources = listed.sources_of()
    blobs = sorted(known, key=lambda b: b.url)
    files = [known[b] for b in blobs]
    shards = [f.entry(name(b)) for b, f in zip(blobs, files, strict=True)]
    bad = [b for blob, file, shard in zip(blobs, files, shards, strict=True) if shard.bad for b in unusable(blob, file)]
    if not any(s.usable for s in shards):
        given = urls if isinstance(urls, str) else ", ".join(u if isinstance(u, str) else u.url for u in urls)
        raise UserError(f"{given}: no usable image in {len(blobs)} shard(s)" + (f"; {bad[0].reason}" if bad else ""))
    sizes = np.array([n for s in shards for n in s.blocks], dtype=np.int64)
    return Index(
        shards=blobs,
        files=files,
        sources=[sources[image_folder.whole(b).url] for b in blobs],
        first=np.r_[0, np.cumsum([s.usable for s in shards])].astype(np.int64),
        starts=np.r_[0, np.cumsum(sizes)].astype(np.int64),
        bad=bad,
        labelled=any(s.labelled for s in shards),
        channels=channels,
    )


def open_shown(urls: Urls, spare: Spare = None, **more: Any) -> Index:
    """Open an index as `open_index` does, for a command: progress is shown with a rate and the time left."""
    from eagleray.base.progress import counting  # this imports rich, which ranks do not need

    with counting("indexing", "files") as tick:
        return open_index(urls, spare, tick=tick, **more)


def write_index(
    urls: Urls, *, note: Note = lambda _: None, tick: Tick | None = None, scan_all: ScanAll = scan_here
) -> list[tuple[str, int, int]]:
    """Index shards again, replacing any older index. `scan_all` reads the shards.

    Return the index's URL and the numbers of usable and of bad samples for every folder."""
    out = []
    for known in _folders(list_data(urls), None, note=note, again=True, tick=tick, scan_all=scan_all):
        mine = [f.entry(name(b)) for b, f in known]
        place = index_file.beside(known[0][0])
        bad = sum(broken(unusable(b, f)) for b, f in known)
        out.append((place, sum(s.usable for s in mine), bad))
    return out


def save(folder: str, shards: Tables) -> str:
    """Write the index of a folder from one table of SCHEMA per shard, and return its URL. The tags of local shards are
    results of `content_tag`."""
    given = sorted(shards, key=lambda shard: shard[0].url)
    known = [(b if store.folder_of(b.url) else _with_tag(b), table) for b, table in given]
    stamps = _stamps(folder, [b for b, _ in known])
    # Stamps, which have times, are kept in this machine's cache: the same images shall make the same index file.
    remember(folder, ((b, stamps[name(b)]) for b, _ in known if stamps))
    return index_file.save(known, [f"{folder}/{NAME}"], {})


@dataclass(frozen=True)
class Listing:
    """The tars and the folders of images that some URLs select, with one listing of every folder of tars."""

    sources: list[Source]
    patterns: list[list[Pattern]]  # the patterns of each source
    folders: list[str]
    tars: dict[Pattern, list[Blob]]
    unread: dict[str, str]  # by folder, what messages say of tars in it that are not read

    @property
    def blobs(self) -> list[Blob]:
        """The tars, each once, in the order of their URLs."""
        return store.each_once(self.tars)

    def sources_of(self) -> dict[str, Source]:
        """Return the source of each shard, by its URL.

        Raises UserError when two sources list a shard and differ in more than the URL."""
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
    """List the data that some URLs select. Raises UserError when a URL selects nothing or cannot be listed."""
    given = [urls] if isinstance(urls, str) else urls
    sources = [Source(url=u) if isinstance(u, str) else u for u in given]
    if not sources:
        raise UserError("no shards are given")
    with answering(patience):
        patterns = [list(store.patterns(s.url, patience)) for s in sources]
        wholes = dict.fromkeys(p.folder for ps in patterns for p in ps if not p.name)
        folders = [folder for folder in wholes if image_folder.holds_images(folder)]
    unread = dict[str, str]()
    tars = store.select([p for ps in patterns for p in ps if p.name or p.folder not in folders], patience, unread)
    for source, of_source in zip(sources, patterns, strict=True):
        tars |= {p: chosen(tars[p], source) for p in of_source if p in tars}
    return Listing(sources, patterns, folders, tars, unread)


def _folders(
    listed: Listing, spare: Spare, *, note: Note, again: bool = False, tick: Tick | None = None, scan_all: ScanAll
) -> Iterator[ShardFiles]:
    """Index the shards that are not in an index. Yield, by folder, all shards, each with the index file of its rows."""
    for folder in listed.folders:
        from eagleray.data.folder_index import open_folder

        yield open_folder(folder, spare, note=note, again=again, tick=tick, scan_all=scan_all)
    for folder, tars in listed.unread.items():
        note(f"{folder}: not read: {tars}")
    globs = [p for p in listed.tars if p.is_glob]  # only these may miss an indexed shard, as named shards exist
    for beside, group in itertools.groupby(sorted(listed.blobs, key=index_file.beside), key=index_file.beside):
        mine = list(group)
        folder, of_parquet = store.parent(mine[0].url), is_parquet(mine[0].url, ".")
        aside = index_file.aside(beside if of_parquet else folder, spare)
        known = load_both(beside, aside, again)
        names = {name(b) for b in mine}
        gone = {n for n in known.keys() - names if any(p.folder == folder and p.matches(n, of_parquet) for p in globs)}
        if gone and not again:
            raise UserError(
                f"{folder}/{min(gone)}: is indexed, but no longer exists; `eagleray index {folder}` accepts that"
            )
        stamps = _stamps(folder, mine)
        if stamps:
            mine, read = tagged(mine, {} if again else known, stamps, folder, note)
        else:
            mine, read = list(map(_with_tag, mine)), False
        mine = as_before(mine, {} if again else known)
        new = [b for b in mine if again or not _is_indexed(b, known)]
        if new or gone:
            note(f"indexing {len(new)} shards of {folder}")
        if new or gone or read:
            scanned = list(_counted(scan_all(new), len(new), tick))
            known |= load_both(beside, aside, again)  # includes what other commands have indexed meanwhile
            others, changed = {n for n in known.keys() - names - gone if not image_folder.is_part(n)}, set(new)
            kept = ((_old_blob(n, known[n], folder), known[n].rows(n)) for n in others)
            same = ((b, known[name(b)].rows(name(b))) for b in mine if b not in changed)
            rows = sorted(itertools.chain(kept, same, scanned), key=lambda row: row[0].url)
            before = {n: known[n].entry(n).stamp for n in others}
            # If only stamps are new, the index need not be writable: this machine remembers them.
            with contextlib.nullcontext() if new or gone else contextlib.suppress(UserError):
                index_file.save(rows, [u for u in (beside, aside) if u], before | stamps)
            known = load_both(beside, aside, again)
        if new and not again:  # `eagleray index`, which indexes again, prints more itself
            for line in lines_of_passed({name(b): known[name(b)].passed.get(name(b), Counter()) for b in new}):
                note(line)
        yield [(replace(b, tag=b.tag or known[name(b)].entry(name(b)).tag), known[name(b)]) for b in mine]


def _with_tag(blob: Blob) -> Blob:
    return replace(blob, tag=store.store(blob.url).tag(blob))


def _stamps(folder: str, blobs: Sequence[Blob]) -> dict[str, Stamp]:
    """Return the stamps of the shards in a local folder, by their names. Other folders have no stamps."""
    return stamps_of(blob.url for blob in blobs) if store.folder_of(folder) else {}


def _old_blob(name: str, file: File, folder: str) -> Blob:
    shard = file.entry(name)
    return Blob(f"{folder}/{name}", shard.size, shard.tag)


def _is_indexed(blob: Blob, known: dict[str, File]) -> bool:
    """Return whether a shard is indexed. Raises UserError when the shard has changed since it was indexed."""
    if name(blob) not in known:
        return False
    check_columns(blob, known[name(blob)].entry(name(blob)))
    old = _old_blob(name(blob), known[name(blob)], store.parent(blob.url))
    # Tags of different stores cannot be compared. A local shard has the tag of its index, unless it has changed.
    comparable = store.folder_of(blob.url) or old.tag.partition(":")[0] == blob.tag.partition(":")[0]
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
