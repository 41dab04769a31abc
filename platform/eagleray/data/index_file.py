"""Reads and writes index.parquet, which has one row group per shard, with the usable samples first.

The metadata holds the names, tags and blocks of all shards. So opening an index reads no rows, and the rows of a shard
are read only when they are needed."""

import hashlib
import itertools
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.base.files import cache_folder, file_lock, write_atomic
from eagleray.data.file_names import readable, to_text
from eagleray.data.index_schema import (
    BLOCK,
    SCHEMA,
    STORED,
    TEXTS,
    VERSION,
    Shard,
    check_rows,
    check_shards,
    largest_rows,
)
from eagleray.data.parquet_pages import largest_page
from eagleray.data.tar_scan import PASSED_OVER, UNLABELLED, UNREAD, Row
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import PATIENCE
from eagleray.storage.shard_names import PARQUET as SUFFIX
from eagleray.storage.shard_names import is_shard

NAME = "index.parquet"
PARQUET_NAME = "_eagleray.index"  # name of the index among Parquet files; readers would take .parquet for data
PARQUET = "parquet"  # key of a table's metadata with the content of `Shard.parquet`
BLOCKS = "blocks"  # key of a table's metadata with the usable samples per block; without it, `blocks` computes them
PASSED = "passed"  # key of metadata with the numbers of skipped members by kind; in an index, by shard and kind
LARGEST_PAGE = 2**24  # most bytes of a page in memory; writers begin a new page after 2^20
MOST_AT_ONCE = 2**28  # most bytes of rows that are read at a time, however their texts are encoded
PACKED = {"key": "DELTA_BYTE_ARRAY", "offset": "DELTA_BINARY_PACKED", "size": "DELTA_BINARY_PACKED"}
Tables = Iterable[tuple[Blob, pa.Table]]
ShardFiles = list[tuple[Blob, "File"]]
Note = Callable[[str], None]
Tick = Callable[[int, int], None]  # called with the numbers of indexed and of all shards or images
Spare = Path | str | None  # folder or URL for the indexes of folders that cannot be written
ASIDE = "index-"  # beginning of the file names of indexes in a spare folder


def table_of(rows: Iterable[Row], passed: Counter[str] | None = None) -> pa.Table:
    """Return rows as a table with the columns of STORED. Its metadata has the numbers of skipped members by kind: of
    unread images and labels, as the rows say, and those that `passed` has after the last row."""
    passed = Counter() if passed is None else passed

    def values(row: Row) -> tuple[Any, ...]:
        passed.update({UNREAD: row.unread, UNLABELLED: row.unlabelled})
        texts = (text and readable(text) for text in (row.reason, row.extension))
        return to_text(row.key), row.offset, row.size, row.label, row.crc, *texts

    columns = list(zip(*map(values, rows), strict=True)) or [()] * len(STORED)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, STORED, strict=True)], STORED)
    return _with_passed(table, +passed)


def _with_passed(table: pa.Table, passed: Counter[str]) -> pa.Table:
    return table.replace_schema_metadata({PASSED: json.dumps(passed)} if passed else None)


class File:
    """One index.parquet on a local disk."""

    def __init__(self, path: Path, url: str = "") -> None:
        """Open the file at `path`, a copy of the file at `url`, if given. Raises ValueError for an invalid index."""
        try:
            self.path, self.url, self._lock = path, url or str(path), threading.Lock()
            self._pages: dict[int, int] = {}  # bytes of the largest page of each row group read so far
            self._inode = os.stat(path).st_ino
            self._map = pa.memory_map(os.fsencode(path))  # stays valid if the file is replaced or moved
            self._file = pq.ParquetFile(self._map)
            self.shards = [Shard(**s) for s in json.loads(self._file.metadata.metadata[b"shards"])]
            check_shards(self.shards, self._file.metadata, self._file.schema_arrow)
            self.passed = _counts(self._file.metadata.metadata)
            more = ("extension", VERSION.name)
            self._names = [*SCHEMA.names, *(n for n in more if n in self._file.schema_arrow.names)]
        except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError) as e:
            raise ValueError(" ".join(str(e).split())[:300]) from None
        self.groups = {s.name: i for i, s in enumerate(self.shards)}

    def __reduce__(self) -> Any:
        if not self.path.exists() or self.path.stat().st_ino != self._inode:  # another command has indexed anew
            self._copy = tempfile.TemporaryDirectory(prefix="eagleray-")  # is deleted with this object
            self.path = Path(self._copy.name) / NAME
            self.path.write_bytes(self._map.read_at(self._map.size(), 0))
            self._inode = self.path.stat().st_ino
        return File, (self.path, self.url)

    def extension(self, group: int, row: int) -> str:
        """Return the extension of an image's file name in its shard, or an empty text if it is not known."""
        known = self.read(group, ["extension"])["extension"][row].as_py() if "extension" in self._names else ""
        return (known or "")[:40]

    def read(self, group: int, columns: Sequence[str] = ()) -> pa.Table:
        """Return all rows of a shard, by default with all columns. Raises UserError when they are invalid."""
        try:
            with self._lock:
                rows = self._read(group, columns or self._names)
            shard = self.shards[group]
            table = _with_passed(rows, self.passed.get(shard.name, Counter()))
            check_rows(table, shard)
            if shard.parquet:
                said = {BLOCKS: json.dumps(shard.blocks), PARQUET: json.dumps(shard.parquet)}
                table = table.replace_schema_metadata((table.schema.metadata or {}) | said)
        except (pa.ArrowException, ValueError, OSError) as e:
            raise self.damaged(f"{self.shards[group].name}: {' '.join(str(e).split())[:300]}") from None
        return table

    def _read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read rows in bounded memory: in a forged index, one long text may be stored once for all rows of a page."""
        if group not in self._pages:
            self._pages[group] = largest_page(self._map, self._file.metadata.row_group(group))
        if self._pages[group] > LARGEST_PAGE:
            raise ValueError(f"a page of {self._pages[group]} bytes")
        if not TEXTS & set(columns):
            return self._file.read_row_group(group, list(columns), use_threads=False)
        rows, shard = MOST_AT_ONCE // max(self._pages[group], 1) + 1, self.shards[group]
        batches, size = list[pa.RecordBatch](), 0
        for batch in self._file.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=False):
            size += batch.nbytes
            if size > largest_rows(shard):
                raise ValueError(f"more than {largest_rows(shard)} bytes of names and reasons")
            batches.append(batch)
        if not batches:
            return self._file.schema_arrow.empty_table().select(list(columns))
        return pa.Table.from_batches(batches).combine_chunks()

    def entry(self, name: str) -> Shard:
        """Return the entry of the shard of this name."""
        return self.shards[self.groups[name]]

    def rows(self, name: str) -> pa.Table:
        """Return all rows of the shard of this name. Raises UserError when they are invalid."""
        return self.read(self.groups[name])

    def damaged(self, what: str) -> UserError:
        """Return the error for an index whose content contradicts itself or its shards."""
        folder = store.parent(self.url)
        return UserError(f"{self.url}: is damaged ({what}); delete it, or run `eagleray index {folder}`")


def _counts(metadata: dict[bytes, bytes]) -> dict[str, Counter[str]]:
    """Return the numbers of skipped members of each shard, by kind. Raises ValueError for metadata of another form."""
    counts = json.loads(metadata.get(PASSED.encode(), b"{}"))
    if not isinstance(counts, dict) or {type(passed) for passed in counts.values()} - {dict}:
        raise ValueError("numbers of members of no shard")
    if any(type(n) is not int or not 0 < n < 2**63 for passed in counts.values() for n in passed.values()):
        raise ValueError("no number of members")
    return {name: Counter({k: n for k, n in passed.items() if k in PASSED_OVER}) for name, passed in counts.items()}


def _plain(entry: Shard) -> dict[str, Any]:
    """Return an entry as values that JSON can hold. Only entries of Parquet files have the key `parquet`."""
    return {key: value for key, value in asdict(entry).items() if key != "parquet" or value is not None}


def blocks(offset: NDArray[np.int64], size: NDArray[np.int64]) -> list[int]:
    """Divide the samples of a shard (n,) into blocks of about BLOCK bytes, and return how many samples each has."""
    if not len(offset):
        return []
    piece = (offset + size - offset[0]) // BLOCK
    return np.diff(np.r_[0, np.flatnonzero(np.diff(piece)) + 1, len(offset)]).tolist()  # type: ignore[no-any-return]


def name(blob: Blob) -> str:
    """Return the file name of a shard."""
    return blob.url.rpartition("/")[2]


def beside(blob: Blob) -> str:
    """Return the URL of the index of the folder that a shard is in. For a data set on the Hugging Face Hub, it is in
    this machine's cache, as the Hub is read-only, and a commit never changes."""
    folder = store.parent(blob.url)
    if folder.startswith("hf://"):
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]
        return str(cache_folder("index") / f"hf-{digest}{'-tars' * is_shard(blob.url, '.')}.index")
    return f"{folder}/{PARQUET_NAME if name(blob).lower().endswith(SUFFIX) else NAME}"


def aside(folder: str, spare: Spare) -> str | None:
    """Return the URL in `spare` for the index of a folder, or None without `spare`."""
    return f"{spare}/{ASIDE}{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}.parquet" if spare else None


def aside_in(spare: str) -> list[Blob]:
    """Return the index files in `spare`, a folder or URL, whose data is in places where no index could be stored."""
    return [blob for blob in store.store(spare).list(f"{spare}/", ASIDE) if blob.url.endswith(".parquet")]


def load(url: str, again: bool) -> dict[str, File]:
    """Return, for each shard in the index at `url`, the index file; an empty dictionary if there is no index.

    Shards are identified by their file names, so that a folder can be moved together with its index. With `again`, an
    unreadable index counts as missing; otherwise it raises UserError."""
    try:
        file = File(local_copy(url), url)
    except FileNotFoundError:
        return {}
    except ValueError as e:
        if isinstance(e, UserError):
            raise
        if again:  # the index is about to be replaced
            return {}
        raise UserError(
            f"{url}: not an index.parquet written by eagleray ({e}); delete it, or run `eagleray index`"
        ) from None
    return dict.fromkeys(file.groups, file)


def load_both(beside: str, aside: str | None, again: bool) -> dict[str, File]:
    """Return what `load` returns for the index `beside` the shards and for the index `aside`, if any. For a shard in
    both, the index beside it counts."""
    return (load(aside, again) if aside else {}) | load(beside, again)


def local_copy(url: str) -> Path:
    """Return a local path with the content of a URL. Raises FileNotFoundError when the file does not exist."""
    if path := store.folder_of(url):
        if not path.is_file():
            raise FileNotFoundError(url)
        return path
    folder, name = store.parent(url), url.rpartition("/")[2]
    here = [b for b in store.store(url).list(folder + "/", name) if b.url == url]
    if not here:
        raise FileNotFoundError(url)
    digest = hashlib.sha256(f"{url} {here[0].tag}".encode()).hexdigest()[:24]
    return fetch_once(url, f"{digest}.parquet")


def fetch_once(url: str, name: str) -> Path:
    """Return this machine's copy of an index in a bucket, which one of its processes fetches. Each content of the file
    must have another `name`. Raises FileNotFoundError when the file does not exist."""
    folder = cache_folder("index")
    if (folder / name).exists():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / "lock"):
            if not (folder / name).exists():
                write_atomic(folder / name, store.store(url).get(url))
            return folder / name
    except FileNotFoundError:
        raise
    except OSError:  # the home folder may not be writable
        path = Path(tempfile.mkdtemp(prefix="eagleray-")) / name
        path.write_bytes(store.store(url).get(url))
        return path


def save(shards: Tables, urls: Sequence[str], stamps: Mapping[str, Sequence[int]]) -> str:
    """Write an index to the first of these URLs that is writable, and return that URL. `stamps` has the stamp of each
    local shard by its name. Raises UserError when no URL is writable."""
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        write(shards, Path(file.name), stamps)
        for url in urls:
            try:
                store.store(url).put(url, Path(file.name), patience=PATIENCE)
                return url
            except OSError as e:
                error = e
    raise UserError(f"{urls[0]}: cannot be written: {error.strerror or error}")


def write(shards: Tables, path: Path, stamps: Mapping[str, Sequence[int]] | None = None) -> None:
    """Write an index with a row group for each shard. The shards come in the order of their URLs, one at a time."""
    entries, passed = list[Shard](), {}
    shards = iter(shards)
    first = next(shards, None)
    stored = STORED.append(VERSION) if first and VERSION.name in first[1].column_names else STORED
    options: Any = {"compression": "zstd", "write_statistics": False}
    options |= {"use_dictionary": ["label", "reason", "extension"], "column_encoding": PACKED}
    with pq.ParquetWriter(path, stored, **options) as writer:
        for blob, table in itertools.chain([first] if first else [], shards):
            said = table.schema.metadata or {}
            if count := said.get(PASSED.encode()):
                passed[name(blob)] = json.loads(count)
            table = table.replace_schema_metadata(None)
            if "extension" not in table.column_names:
                table = table.append_column(STORED.field("extension"), pa.nulls(len(table), pa.string()))
            good = pc.is_null(table["reason"])
            usable, bad = table.filter(good), table.filter(pc.invert(good))
            offset, size, label = (usable[n].to_numpy() for n in ("offset", "size", "label"))
            entries.append(
                Shard(
                    name(blob),
                    blob.size,
                    blob.tag,
                    len(usable),
                    len(bad),
                    bool((label >= 0).any()),
                    json.loads(said[BLOCKS.encode()]) if BLOCKS.encode() in said else blocks(offset, size),
                    list((stamps or {}).get(name(blob), ())),
                    json.loads(said[PARQUET.encode()]) if PARQUET.encode() in said else None,
                )
            )
            writer.write_table(pa.concat_tables([usable, bad]).combine_chunks(), row_group_size=max(len(table), 1))
        writer.add_key_value_metadata({"shards": json.dumps([_plain(e) for e in entries]), PASSED: json.dumps(passed)})
