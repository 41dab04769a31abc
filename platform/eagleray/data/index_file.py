"""Reads and writes index.parquet, which has a row group for every shard, usable samples first.

Its metadata holds the names, tags and blocks of all shards, so an index is opened without reading a row, and the rows
of a shard are read only when they are needed.
"""

import hashlib
import json
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.base.files import cache_folder
from eagleray.storage import store
from eagleray.storage.blob import Blob

NAME = "index.parquet"
BLOCK = 16 * 2**20  # bytes: one ranged read, and the unit of shuffling
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("offset", pa.int64()),  # of the image's bytes in the shard
        ("size", pa.int64()),  # of the image, bytes
        ("label", pa.int64()),  # -1: none
        ("crc", pa.uint32()),  # zlib.crc32 of the image's bytes
        ("reason", pa.string()),  # why the sample cannot be used; null where it can
    ]
)
PACKED = {"key": "DELTA_BYTE_ARRAY", "offset": "DELTA_BINARY_PACKED", "size": "DELTA_BINARY_PACKED"}


Tables = Iterable[tuple[Blob, pa.Table]]


@dataclass(frozen=True, slots=True)
class Shard:
    """The entry of a shard in the metadata of an index."""

    name: str
    size: int  # bytes
    tag: str
    usable: int
    bad: int
    labelled: bool
    blocks: list[int]  # usable samples in each


class File:
    """One index.parquet on a local disk."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ValueError when it is not an index."""
        try:
            self.path, self._lock = path, threading.Lock()
            self._file = pq.ParquetFile(path, memory_map=True)
            self.shards = [Shard(**s) for s in json.loads(self._file.metadata.metadata[b"shards"])]
        except (pa.ArrowException, KeyError, TypeError, ValueError) as e:
            raise ValueError(" ".join(str(e).split())) from None
        self.groups = {s.name: i for i, s in enumerate(self.shards)}

    def __reduce__(self) -> Any:
        return File, (self.path,)

    def read(self, group: int, columns: Sequence[str] = tuple(SCHEMA.names)) -> pa.Table:
        """Return all rows of a shard."""
        with self._lock:
            return self._file.read_row_group(group, list(columns), use_threads=False)


def blocks(offset: NDArray[np.int64], size: NDArray[np.int64]) -> list[int]:
    """Divide the samples of one shard (n,) into blocks of about BLOCK bytes, and return the samples of each block."""
    if not len(offset):
        return []
    piece = (offset + size - offset[0]) // BLOCK
    return np.diff(np.r_[0, np.flatnonzero(np.diff(piece)) + 1, len(offset)]).tolist()  # type: ignore[no-any-return]


def name(blob: Blob) -> str:
    """Return the file name of a shard."""
    return blob.url.rpartition("/")[2]


def load(url: str, again: bool) -> dict[str, File]:
    """Return, for each shard in the index at `url`, the index file; an empty dictionary if there is no index.

    Shards are identified by their file names, so that a folder may be moved together with its index. With `again`, an
    unreadable index counts as missing; otherwise it raises UserError.
    """
    try:
        file = File(local_copy(url))
    except FileNotFoundError:
        return {}
    except ValueError as e:
        if isinstance(e, UserError):
            raise
        if again:  # it is about to be replaced
            return {}
        raise UserError(
            f"{url}: not an index.parquet written by eagleray ({e}); delete it, or run `eagleray index`"
        ) from None
    return dict.fromkeys(file.groups, file)


def local_copy(url: str) -> Path:
    """Return a local path with the content of a URL. Raises FileNotFoundError when there is no such file."""
    if not url.startswith("s3:"):
        path = store.local_path(url)
        if not path.is_file():
            raise FileNotFoundError(url)
        return path
    folder, name = store.parent(url), url.rpartition("/")[2]
    here = [b for b in store.store(url).list(folder + "/", name) if b.url == url]
    if not here:
        raise FileNotFoundError(url)
    digest = hashlib.sha256(f"{url} {here[0].tag}".encode()).hexdigest()[:24]
    path = cache_folder("index") / f"{digest}.parquet"
    if not path.exists():
        data = store.store(url).get(url)
        try:
            store.put_bytes(str(path), data)
        except OSError:  # a home folder that cannot be written
            path = Path(tempfile.mkdtemp(prefix="eagleray-")) / path.name
            path.write_bytes(data)
    return path


def save(shards: Tables, urls: Sequence[str]) -> str:
    """Write an index to the first of these URLs that can be written, and return that URL. Raises UserError."""
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        write(shards, Path(file.name))
        for url in urls:
            try:
                store.store(url).put(url, Path(file.name))
                return url
            except OSError as e:
                error = e
    raise UserError(f"{urls[0]}: cannot be written: {error.strerror or error}")


def write(shards: Tables, path: Path) -> None:
    """Write an index with a row group for each shard, in the order of their URLs."""
    entries = []
    options: Any = {"compression": "zstd", "write_statistics": False, "use_dictionary": ["label", "reason"]}
    with pq.ParquetWriter(path, SCHEMA, column_encoding=PACKED, **options) as writer:
        for blob, table in sorted(shards, key=lambda s: s[0].url):
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
                    blocks(offset, size),
                )
            )
            writer.write_table(pa.concat_tables([usable, bad]).combine_chunks(), row_group_size=max(len(table), 1))
        writer.add_key_value_metadata({"shards": json.dumps([asdict(e) for e in entries])})
