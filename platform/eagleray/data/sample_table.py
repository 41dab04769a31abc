"""Tables with a row for each sample of a data set, in the order of its index: embeddings, measured columns.

A table is a folder with `_table.json`, which is written first and describes all rows, and the files
`part-000000.parquet` and so on, each written as a whole. So interrupted work continues, and gives the same bytes."""

import functools
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.base.errors import UserError, explained
from eagleray.base.files import writing
from eagleray.config.channels import Channels
from eagleray.data.digests import data_digest
from eagleray.data.index import Index, open_index
from eagleray.storage.blob import Blob
from eagleray.storage.store import find, parent, store

ABOUT = "_table.json"  # name that readers of a folder of Parquet files ignore
FORMAT = 1
ROWS = 16_384  # rows per part


@dataclass(frozen=True)
class About:
    """Describes the rows of a table. Two tables have equal rows if all fields but `note` are equal."""

    what: str  # kind of the table, such as embedding
    settings: Mapping[str, Any]  # what the rows depend on; values that JSON can hold
    data: str  # digest of the images
    images: int
    note: str = ""  # one line for people
    format: int = FORMAT
    shards: Mapping[str, list[str]] = field(default_factory=dict)  # results of `shard_digests`, for measured columns

    def difference(self, other: "About") -> str:
        """Return how another table differs, such as `size=224`, or an empty text if the rows of both are equal."""
        if (self.data, self.images) != (other.data, other.images):
            return f"other images ({other.images:,}, here {self.images:,})"
        mine, theirs = ({"what": a.what, "format": a.format, **a.settings} for a in (self, other))
        changed = [f"{k}={theirs.get(k)}" for k in (*mine, *theirs) if mine.get(k) != theirs.get(k)]
        said = f" ({other.note})" if other.note else ""
        return ", ".join(dict.fromkeys(changed)) + said if changed else ""


@dataclass(frozen=True)
class SampleTable:
    """A table in a folder or an s3:// URL."""

    folder: str
    about: About

    @classmethod
    def create(cls, folder: str, about: About) -> "SampleTable":
        """Return a table to begin or to continue. Raises UserError when the folder has a table of other rows."""
        known = read_about(folder)
        if known and (other := about.difference(known)):
            raise UserError(f"{folder}: has a table of {other}; out=FOLDER names another place")
        if not known:
            place = f"{folder}/{ABOUT}"
            with writing(f"out={folder}"):
                store(place).write(place, json.dumps(asdict(about), indent=1).encode())
        return cls(folder, about)

    @property
    def parts(self) -> range:
        """Return the indices of the parts."""
        return range(-(-self.about.images // ROWS))

    def samples(self, number: int) -> NDArray[np.int64]:
        """Return the indices of a part's samples."""
        return np.arange(number * ROWS, min((number + 1) * ROWS, self.about.images), dtype=np.int64)

    def missing(self) -> list[int]:
        """Return the indices of the parts that are not written yet."""
        there = {blob.url.rpartition("/")[2] for blob in store(self.folder).list(f"{self.folder}/", "part-")}
        return [number for number in self.parts if file_name(number) not in there]

    def write(self, number: int, index: Index, columns: Mapping[str, Any]) -> None:
        """Write a part: its samples' shard, key and label, then `columns`. Raises UserError when it cannot be
        written."""
        samples, buffer = self.samples(number), io.BytesIO()
        names = [blob.url.rpartition("/")[2] for blob in index.shards]
        shard = pa.DictionaryArray.from_arrays(pa.array(index.shard[samples]), names)
        key = index.keys(int(samples[0]), int(samples[-1]) + 1)
        rows = pa.table({"shard": shard, "key": key, "label": index.label[samples], **columns})
        pq.write_table(rows, buffer, compression="zstd", use_dictionary=["shard", "label"])
        with writing(f"out={self.folder}"):
            store(self.folder).write(f"{self.folder}/{file_name(number)}", buffer.getvalue())

    def read(self, number: int, columns: Sequence[str]) -> pa.Table:
        """Return columns of a part. Raises UserError when it is missing, damaged or not as `_table.json` says."""
        rows = self._load(number, lambda file: pq.read_table(file, columns=list(columns)))
        place = f"{self.folder}/{file_name(number)}"
        if len(rows) != len(self.samples(number)) or set(rows.column_names) != set(columns):
            raise UserError(f"{place}: {len(rows)} rows of {', '.join(rows.column_names)}, not as {ABOUT} says")
        return rows

    def columns(self) -> list[str]:
        """Return the names of the columns after shard, key and label. Raises UserError for a damaged first part."""
        return [name for name in self._load(0, pq.read_schema).names if name not in ("shard", "key", "label")]

    def _load(self, number: int, read: Callable[[io.BytesIO], Any]) -> Any:
        """Return what `read` reads from the file of a part. Raises UserError when the file is missing or damaged."""
        place = f"{self.folder}/{file_name(number)}"
        again = f"{place}: missing or damaged; delete it, and the same command writes it again"
        with explained(again, FileNotFoundError, pa.ArrowException, why=False):
            return read(io.BytesIO(store(place).get(place)))


def file_name(number: int) -> str:
    """Return the file name of a part."""
    return f"part-{number:06d}.parquet"


@functools.lru_cache(maxsize=1)
def index_of(url: str, data: str, channels: Channels = ()) -> Index:
    """Open the index of a table's data, whose images have these channels. The last index is kept for the next call.
    Raises UserError when the data's digest is not `data`."""
    index = open_index(url, note=lambda _: None, channels=channels)
    if data_digest(index, np.arange(len(index))) != data:
        raise UserError(f"{url}: the data changed meanwhile; the same command begins anew in another folder")
    return index


def read_about(folder: str) -> About | None:
    """Return the description of the table in a folder or URL, or None without one. Raises UserError if damaged."""
    place = f"{folder}/{ABOUT}"
    with explained(f"{place}: not the description of a table of samples", ValueError, TypeError, why=False):
        return None if (text := find(place)) is None else About(**json.loads(text))


def home_of(index: Index) -> str:
    """Return the folder of all shards. Raises UserError when the shards are in several folders."""
    folders = homes(index.shards)
    if len(folders) > 1:
        raise UserError(f"out: missing; the shards are in {len(folders)} folders, such as {min(folders)}")
    return folders.pop()


def homes(shards: Iterable[Blob]) -> set[str]:
    """Return the folders of some shards."""
    return {parent(blob.url) for blob in shards}


def complete_tables(shards: Iterable[Blob], inside: str, wanted: Callable[[About], bool]) -> Iterator[SampleTable]:
    """Yield those of `tables_beside` that are complete."""
    return (table for table in tables_beside(shards, inside, wanted) if not table.missing())


def tables_beside(shards: Iterable[Blob], inside: str, wanted: Callable[[About], bool]) -> Iterator[SampleTable]:
    """Yield the tables that `wanted` accepts, complete or not, in the folder `inside` beside some shards. If the shards
    are in several folders, there are none."""
    home, *others = homes(shards)
    if others or home.startswith(("http://", "https://")):  # web servers list nothing, and nothing was written there
        return
    folders = {b.url.rpartition("/")[0] for b in store(home).walk(f"{home}/{inside}/") if b.url.endswith(f"/{ABOUT}")}
    for folder in sorted(folders):
        about = read_about(folder)
        if about and wanted(about):
            yield SampleTable(folder, about)
