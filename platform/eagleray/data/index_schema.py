"""Defines the content of an index, and checks that it is possible, as an index may come from a stranger's bucket."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagleray.data.image_folder import is_part
from eagleray.data.tar_headers import BLOCK as HEADER
from eagleray.data.tar_headers import LONGEST_NAME
from eagleray.data.tar_scan import LARGEST

BLOCK = 16 * 2**20  # bytes of a block, whose samples are fetched by one ranged read and shuffled together
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("offset", pa.int64()),  # first byte of the image in the shard
        ("size", pa.int64()),  # bytes of the image
        ("label", pa.int64()),  # class; -1: none
        ("crc", pa.uint32()),  # zlib.crc32 of the image's bytes
        ("reason", pa.string()),  # why the sample cannot be used; null if it can
    ]
)
STORED = SCHEMA.append(pa.field("extension", pa.string()))  # extension of the image's file name in the tar, if known
VERSION = pa.field("version", pa.int64())  # digest of an image's version, for folders in a store
TEXTS = {"key", "reason", "extension"}
MOST_ROWS = 2**24  # most samples of one shard
LARGEST_BLOCK = 8 * BLOCK  # most bytes from the end of the first image of a block to that of its last
DEEPEST = 16  # most optional fields around the images of a Parquet file


@dataclass(frozen=True, slots=True)
class Shard:
    """The entry of a shard in the metadata of an index."""

    name: str
    size: int  # bytes
    tag: str
    usable: int
    bad: int
    labelled: bool
    blocks: list[int]  # usable samples of each block
    stamp: Sequence[int] = ()  # times and inode of a local file when it was indexed, as in stamps.py
    parquet: dict[str, Any] | None = None  # columns of a Parquet file, and the pages of its blocks

    @property
    def extent(self) -> int:
        """The end of the range of the images' offsets: the size of a file, or of all images of a Parquet file."""
        return self.parquet["ends"][-1] if self.parquet and self.parquet["ends"] else self.size


def check_shards(shards: list[Shard], metadata: pq.FileMetaData, schema: pa.Schema) -> None:
    """Check the shards' entries against each other and their row groups. Raises ValueError for an impossible entry."""
    if len(set(schema.names)) < len(schema.names):
        raise ValueError("two columns of one name")
    if not {field.name: field.type for field in SCHEMA}.items() <= {field.name: field.type for field in schema}.items():
        raise ValueError("other columns")
    if len(shards) != metadata.num_row_groups:
        raise ValueError(f"{len(shards)} shards in {metadata.num_row_groups} row groups")
    texts = {type(value) for s in shards for value in (s.name, s.tag)}
    numbers = {type(value) for s in shards for value in (s.size, s.usable, s.bad)} | {
        type(n) for s in shards for n in s.stamp
    }
    if not (texts <= {str} and numbers <= {int} and {type(s.blocks) for s in shards} <= {list}):
        raise ValueError("names, sizes or blocks of another type")
    if {type(n) for s in shards for n in s.blocks} - {int} or min(
        itertools.chain([1], *(s.blocks for s in shards))
    ) < 1:
        raise ValueError("a block without samples")
    if len({s.name for s in shards}) < len(shards):
        raise ValueError("two shards of one name")
    for group, s in enumerate(shards):
        rows = s.usable + s.bad
        # A sample of a tar takes at least one header. One more row may tell of a fault of the shard itself.
        most = MOST_ROWS if is_part(s.name) or s.parquet else min(s.size // HEADER + 1, MOST_ROWS)
        if s.parquet is not None:
            _check_parquet(s)
        if not 0 <= s.size < 2**62 or min(s.usable, s.bad) < 0 or s.usable > s.extent or rows > most:
            raise ValueError(f"{s.name}: {s.usable} and {s.bad} samples in {s.size} bytes")
        if sum(s.blocks) != s.usable:
            raise ValueError(f"{s.name}: blocks of {sum(s.blocks)} samples, of {s.usable}")
        if metadata.row_group(group).num_rows != rows:
            raise ValueError(f"{s.name}: {metadata.row_group(group).num_rows} rows of {rows} samples")


def _check_parquet(shard: Shard) -> None:
    """Check the blocks in the entry of a Parquet file. Raises ValueError for impossible blocks."""
    known = shard.parquet
    if not isinstance(known, dict) or {type(known.get(name)) for name in ("image", "label")} != {str}:
        raise ValueError(f"{shard.name}: no columns")
    given: list[Any] = [known.get(name) for name in ("depth", "ends", "chunks", "classes")]
    depth, ends, chunks, classes = given
    lists: list[Any] = [*chunks, ends, classes] if {type(v) for v in (ends, chunks, classes)} == {list} else [None]
    if {type(each) for each in lists} != {list} or {type(name) for name in classes or ()} - {str}:
        raise ValueError(f"{shard.name}: no lists of blocks and classes")
    if {type(n) for each in lists[:-1] for n in each} - {int} or type(depth) is not int or not 0 <= depth <= DEEPEST:
        raise ValueError(f"{shard.name}: a block of other values than numbers")
    if len(ends) != len(shard.blocks) or [len(row) for row in chunks] != [max(len(r) // 4 * 4, 4) for r in chunks]:
        raise ValueError(f"{shard.name}: {len(ends)} ends of {len(shard.blocks)} blocks")
    if len(ends) != len(chunks) or any(not 0 < b - a <= LARGEST_BLOCK for a, b in itertools.pairwise([0, *ends])):
        raise ValueError(f"{shard.name}: a block of no bytes, or of more than {LARGEST_BLOCK}")
    for row in chunks:
        places = [n for at in range(0, len(row), 4) for n in row[at : at + 2]]
        if places != sorted(places) or not 0 <= places[0] <= places[-1] <= shard.size:
            raise ValueError(f"{shard.name}: pages outside of the file")
        if places[-1] - places[0] > LARGEST_BLOCK or min(row[2::4] + row[3::4]) < 0 or max(row[2::4]) > MOST_ROWS:
            raise ValueError(f"{shard.name}: a block of {places[-1] - places[0]} bytes and {row[2::4]} rows")


def largest_rows(shard: Shard) -> int:
    """Return the most bytes that the rows of a shard may take in memory, so that a forged index cannot exhaust it.
    Names in a tar are in its headers, and a byte that is not UTF-8 is stored as three. Names in a folder of images or a
    Parquet file may take more bytes than the shard, so LONGEST_NAME limits them. Other columns of a row get 1 KiB."""
    far = is_part(shard.name) or shard.parquet is not None
    names = 3 * LONGEST_NAME * (shard.usable + shard.bad) if far else 3 * shard.size
    return names + 2**10 * (shard.usable + shard.bad + 1)


def check_rows(table: pa.Table, shard: Shard) -> None:
    """Check those columns of a shard's rows that the table has. Raises ValueError or an ArrowException."""
    table.validate(full=True)  # checks that texts are UTF-8
    if len(table) != shard.usable + shard.bad:
        raise ValueError(f"{len(table)} rows of {shard.usable + shard.bad} samples")
    usable = table.slice(0, shard.usable)
    for column in usable.column_names:
        if column not in ("reason", "extension", VERSION.name) and usable[column].null_count:
            raise ValueError(f"a sample without {column}")
    if "key" in table.column_names and table["key"].null_count:
        raise ValueError("a sample without key")
    if "reason" in table.column_names and (
        usable["reason"].null_count != shard.usable or table["reason"].null_count != shard.usable
    ):
        raise ValueError("usable samples do not come first")
    if "reason" in table.column_names and pc.any(pc.equal(table["reason"], "")).as_py():
        raise ValueError("a bad sample without reason")
    if "label" in table.column_names and shard.usable and pc.min(usable["label"]).as_py() < -1:
        raise ValueError("a label below -1")
    if "size" in table.column_names and shard.usable:
        smallest, largest = pc.min_max(usable["size"]).as_py().values()
        if smallest < 1 or largest > LARGEST:
            raise ValueError(f"images of {smallest} to {largest} bytes")
    if {"offset", "size"} <= set(table.column_names):
        _check_positions(usable["offset"].to_numpy(), usable["size"].to_numpy(), shard)


def _check_positions(offset: NDArray[np.int64], size: NDArray[np.int64], shard: Shard) -> None:
    """Check that a shard's usable images (n,) follow each other inside it, and that no block of them is too large.
    Raises ValueError."""
    if not len(offset):
        return
    inside = offset.min() >= 0 and offset.max() <= shard.extent  # first, so that the sums below fit into 64 bits
    if not inside or offset[-1] > shard.extent - size[-1] or (offset[:-1] + size[:-1] > offset[1:]).any():
        raise ValueError(f"images that overlap, or lie outside of {shard.extent} bytes")
    last = np.cumsum(shard.blocks) - 1
    end = offset + size
    if (end[last] - end[np.r_[0, last[:-1] + 1]]).max() > LARGEST_BLOCK:
        raise ValueError(f"a block of more than {LARGEST_BLOCK} bytes")
