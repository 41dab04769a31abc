"""Where every sample is: one Parquet file per folder of shards, made once by reading the tars' headers."""

import functools
import hashlib
import io
import itertools
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from eagleray.data import store
from eagleray.data.quarantine import Bad
from eagleray.data.store import Blob
from eagleray.errors import UserError

NAME = "index.parquet"
BLOCK = 16 * 2**20  # bytes: one ranged read, and the unit of shuffling
READ = 2**20  # bytes per request while headers are read
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("offset", pa.int64()),  # of the image's bytes in the shard
        ("size", pa.int64()),  # of the image, bytes
        ("label", pa.int64()),  # -1: none
        ("reason", pa.string()),  # why the sample cannot be used; null where it can
    ]
)


@dataclass(frozen=True)
class Index:
    """N usable samples in the order of their shards, and the B blocks that they lie in."""

    shards: list[Blob]
    shard: NDArray[np.int32]  # (N,) position in `shards`
    offset: NDArray[np.int64]  # (N,)
    size: NDArray[np.int64]  # (N,)
    label: NDArray[np.int64]  # (N,)
    keys: pa.ChunkedArray  # (N,)
    bad: list[Bad]
    starts: NDArray[np.int64]  # (B + 1,) first sample of each block, and N

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def labelled(self) -> bool:
        return bool((self.label >= 0).any())

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """Samples per block (B,)."""
        return np.diff(self.starts)

    def named(self, sample: int, reason: str) -> Bad:
        """A sample that turned out not to be usable."""
        blob = self.shards[self.shard[sample]]
        return Bad(blob.url, self.keys[sample].as_py(), int(self.offset[sample]), reason)


@functools.cache
def image_extensions() -> frozenset[str]:
    """What a file of any format that PIL reads may end in, without the dot."""
    return frozenset(e[1:] for e, kind in Image.registered_extensions().items() if kind in Image.OPEN)


Note = Callable[[str], None]
Tick = Callable[[int, int], None]  # shards done, shards in all


def open_index(urls: str | Sequence[str], spare: Path | None = None, *, note: Note = print) -> Index:
    """The index of some shards; what is not indexed yet is indexed first, and `note` is told.

    The file is kept beside the shards or, where nothing can be written there, in the folder `spare`. Raises UserError
    when a shard is not the one that was indexed, and when there is no image at all.
    """
    tables = dict(itertools.chain.from_iterable(_folders(urls, spare, note=note)))
    blobs = sorted(tables, key=lambda b: b.url)
    whole = pa.concat_tables([tables[b] for b in blobs])
    shard = np.repeat(np.arange(len(blobs), dtype=np.int32), [len(tables[b]) for b in blobs])
    good = pc.is_null(whole["reason"]).to_numpy(zero_copy_only=False)
    broken = zip(shard[~good], whole.filter(pa.array(~good)).to_pylist(), strict=True)
    bad = [Bad(blobs[s].url, row["key"], row["offset"], row["reason"]) for s, row in broken]
    if not good.any():
        raise UserError(f"{urls}: no usable image in {len(blobs)} shard(s)" + (f"; {bad[0].reason}" if bad else ""))
    whole, shard = whole.filter(pa.array(good)), shard[good]
    columns = {name: whole[name].to_numpy() for name in ("offset", "size", "label")}
    starts = blocks(shard, columns["offset"], columns["size"])
    return Index(shards=blobs, shard=shard, keys=whole["key"], bad=bad, starts=starts, **columns)


def write_index(urls: str | Sequence[str], *, tick: Tick | None = None) -> list[tuple[str, int, int]]:
    """Index some shards anew, whatever an older index says. Returns (index URL, usable, bad) of every folder."""
    out = []
    for tables in _folders(urls, None, note=lambda _: None, again=True, tick=tick):
        rows = pa.concat_tables([table for _, table in tables])
        good = int(pc.sum(pc.is_null(rows["reason"])).as_py() or 0)
        out.append((f"{store.parent(tables[0][0].url)}/{NAME}", good, len(rows) - good))
    return out


def blocks(shard: NDArray[np.int32], offset: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut samples in shard order into runs of about BLOCK bytes that lie in one shard: first samples, and N."""
    first = np.flatnonzero(np.r_[True, np.diff(shard) != 0])
    begin = np.repeat(offset[first], np.diff(np.r_[first, len(shard)]))
    piece = (offset + size - begin) // BLOCK
    cut = np.r_[True, (np.diff(piece) != 0) | (np.diff(shard) != 0)]
    return np.r_[np.flatnonzero(cut), len(shard)].astype(np.int64)


Tables = list[tuple[Blob, pa.Table]]


def _folders(
    urls: str | Sequence[str], spare: Path | None, *, note: Note, again: bool = False, tick: Tick | None = None
) -> Iterator[Tables]:
    """Each folder's shards with their rows."""
    blobs = store.shards(urls)
    for folder, group in itertools.groupby(blobs, key=lambda b: store.parent(b.url)):
        mine = [replace(b, tag=store.store(b.url).tag(b)) for b in group]
        beside = f"{folder}/{NAME}"
        aside = str(spare / f"index-{hashlib.sha256(folder.encode()).hexdigest()[:12]}.parquet") if spare else None
        known = (_load(aside, again) if aside else {}) | _load(beside, again)
        new = [b for b in mine if again or not _same(b, known)]
        if new:
            note(f"indexing {len(new)} shards of {folder}")
            known |= {b.url.rpartition("/")[2]: (b, table) for b, table in _scan_all(new, tick)}
            _save(known, beside, aside)
        yield [(b, known[b.url.rpartition("/")[2]][1]) for b in mine]


Known = dict[str, tuple[Blob, pa.Table]]  # by file name, so that a folder may be moved with its index


def _same(blob: Blob, known: Known) -> bool:
    """Whether the index knows this shard. Raises UserError when it knows another one of this name."""
    old = known.get(blob.url.rpartition("/")[2], (None, None))[0]
    if old is None:
        return False
    comparable = old.tag.partition(":")[0] == blob.tag.partition(":")[0]
    if old.size != blob.size or (comparable and old.tag != blob.tag):
        raise UserError(
            f"{blob.url}: changed since it was indexed ({old.size} bytes {old.tag}, now {blob.size} {blob.tag}); "
            f"`eagleray index {store.parent(blob.url)}` accepts the new one"
        )
    return True


def _load(url: str, again: bool) -> Known:
    try:
        table = pq.read_table(io.BytesIO(store.store(url).get(url)))
        shards = json.loads(table.schema.metadata[b"shards"])
    except FileNotFoundError:
        return {}
    except (pa.ArrowException, KeyError, TypeError, ValueError) as e:
        if again:  # it is about to be replaced
            return {}
        raise UserError(
            f"{url}: is not an index of this program ({e}); delete it or `eagleray index` the shards"
        ) from None
    ends = np.cumsum([0] + [s["rows"] for s in shards])
    return {
        s["name"]: (Blob(s["name"], s["size"], s["tag"]), table.slice(int(a), s["rows"]))
        for s, a in zip(shards, ends[:-1], strict=True)
    }


def _save(known: Known, beside: str, aside: str | None) -> None:
    shards = [{"name": n, "size": b.size, "tag": b.tag, "rows": len(t)} for n, (b, t) in sorted(known.items())]
    whole = pa.concat_tables([table for _, (_, table) in sorted(known.items())])
    buffer = io.BytesIO()
    pq.write_table(whole.replace_schema_metadata({"shards": json.dumps(shards)}), buffer, compression="zstd")
    for url in filter(None, (beside, aside)):
        try:
            return store.put_bytes(url, buffer.getvalue())
        except OSError as e:
            error = e
    raise UserError(f"{beside}: cannot be written: {error.strerror or error}")


def _scan_all(blobs: list[Blob], tick: Tick | None) -> Iterator[tuple[Blob, pa.Table]]:
    with ThreadPoolExecutor(8) as pool:
        for done, (blob, rows) in enumerate(zip(blobs, pool.map(lambda b: list(scan(b)), blobs), strict=True), 1):
            yield blob, pa.Table.from_pylist([asdict(r) for r in rows], SCHEMA)
            if tick:
                tick(done, len(blobs))


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a shard; with an empty key, what is wrong with the shard itself."""

    key: str = ""
    offset: int = -1
    size: int = 0
    label: int = -1
    reason: str | None = None


def scan(blob: Blob) -> Iterator[Row]:
    """The samples of one tar, bad ones with their reason: neighbouring members that share a key, as webdataset groups
    them."""
    samples = 0
    try:
        source: Any = io.BufferedReader(_Ranges(blob), READ)
        with tarfile.open(fileobj=source, mode="r:") as tar:
            for key, members in itertools.groupby(_files(tar, blob), key=lambda m: m[0]):
                samples += 1
                yield _row(key, [(ext, m) for _, ext, m in members], source, blob)
            rest = blob.size - tar.offset
            source.seek(tar.offset)
            if rest > 0 and source.read(512).strip(b"\0"):
                yield Row(offset=tar.offset, reason=f"the shard is cut off or damaged after {samples} samples")
            elif samples == 0:
                yield Row(reason="the shard holds no samples")
    except tarfile.TarError as e:
        yield Row(reason=f"not a tar archive: {e}" if blob.size else "the file is empty")


def _files(tar: tarfile.TarFile, blob: Blob) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Key, extension and header of every file; one whose bytes are cut off is the last."""
    while member := tar.next():
        parts = re.fullmatch(r"((?:.*/|)[^./][^.]*)\.([^/]*)", member.name)  # webdataset: a key ends at its first dot
        if member.isfile() and parts:
            yield parts[1], parts[2].lower(), member
        if member.offset_data + member.size > blob.size:
            return


def _row(key: str, members: list[tuple[str, tarfile.TarInfo]], source: Any, blob: Blob) -> Row:
    image = next((m for ext, m in members if ext.rpartition(".")[2] in image_extensions()), None)
    label, reason = -1, None
    for ext, m in members:
        if ext.rpartition(".")[2] == "cls":
            source.seek(m.offset_data)
            text = source.read(min(m.size, 64)).decode(errors="replace").strip()
            if re.fullmatch(r"\d{1,18}", text):
                label = int(text)
            else:
                reason = f"its label is not a whole number from 0 on: {text!r}"
    if image is None:
        return Row(key, reason="no image: only " + ", ".join(ext for ext, _ in members))
    cut = next((m for _, m in members if m.offset_data + m.size > blob.size), None)
    if cut:
        reason = f"cut off: {cut.size} bytes from {cut.offset_data}, the shard ends at {blob.size}"
    elif image.size == 0:
        reason = "the image has no bytes"
    return Row(key, image.offset_data, image.size, label, reason)


class _Ranges(io.RawIOBase):
    """A stored file as a seekable stream."""

    def __init__(self, blob: Blob) -> None:
        self.blob, self.at = blob, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        self.at = to + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.blob.size}[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        length = max(min(len(buffer), self.blob.size - self.at), 0)
        buffer[:length] = store.store(self.blob.url).read(self.blob.url, self.at, length) if length else b""
        self.at += length
        return length
