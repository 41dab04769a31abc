"""Write one shard from its items. The same options and items give the same bytes in any process."""

import contextlib
import io
import json
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from eagleray.base.files import writing
from eagleray.data.channels import read_channels
from eagleray.data.costs import BadImage
from eagleray.data.file_names import to_text
from eagleray.data.index_schema import STORED
from eagleray.data.pixels import image_extensions
from eagleray.data.tar_headers import members
from eagleray.data.unchanged import content_tag
from eagleray.datasets.sources.item import Item
from eagleray.datasets.sources.source import Read, fetch
from eagleray.datasets.stats import ImageStats, fit_within, image_format
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.range_file import PATIENCE

if TYPE_CHECKING:
    from torch import Tensor

QUALITY = 95  # quality of the JPEG of a shrunk image, whose chroma is not subsampled
EXTENSIONS = {"JPEG": "jpg", "JPEG2000": "jp2"}  # by PIL's name of the format; others have that name in lower case
NOTES = ".prepare"  # folder in the destination for the plan and the notes of finished tasks, deleted at the end


@dataclass(frozen=True)
class ShardNote:
    """The record of a finished shard: its file, its rows of the index and the statistics of its images."""

    blob: Blob  # the shard's file, with the tag of `content_tag`; size 0: no image was left, so there is no file
    ends: str  # checksum of the beginning and the end of the file
    rows: pa.Table  # columns of STORED
    stats: ImageStats


@dataclass(frozen=True)
class PackTask:
    """A task that writes a shard and then its note, the file that records that the shard is finished."""

    destination: str
    read: Read
    max_side: int
    min_side: int
    plan: str  # digest of the plan that the shard belongs to
    channels: int = 0  # number of channels of the images; 0: red, green and blue

    def __call__(self, task: tuple[int, bytes]) -> int:
        """Run the task (index of the shard, serialized items). Return the number of items."""
        number, message = task
        items = pa.ipc.open_stream(message).read_all()
        url = f"{self.destination}/shard-{number:06d}.tar"
        with tempfile.NamedTemporaryFile() as file:
            stats, rows = self._write(items, file)
            file.flush()
            size = file.tell() if stats.images else 0
            written = Blob(file.name, size)
            tag, ends = (content_tag(written), store.local_tag(written)) if size else ("", "")
            if size:
                put(url, Path(file.name))
        note = ShardNote(Blob(url, size, tag), ends, rows, stats)
        write_note(f"{self.destination}/{NOTES}/{note_name(number)}", note, self.plan)
        return len(items)

    def is_done(self, number: int, sizes: Mapping[str, int]) -> bool:
        """Return whether a shard was finished under this plan, and its file still has the size that was written.

        `sizes` are those of the destination's files, by URL. For a local file, the checksum `ends` is compared as
        well."""
        note = read_note(f"{self.destination}/{NOTES}/{note_name(number)}", self.plan)
        if note is None or not note.blob.size:
            return note is not None
        blob = note.blob
        return sizes.get(blob.url) == blob.size and (
            not store.folder_of(blob.url) or store.local_tag(blob) == note.ends
        )

    def _write(self, items: pa.Table, file: "tempfile._TemporaryFileWrapper[bytes]") -> tuple[ImageStats, pa.Table]:
        from webdataset import TarWriter

        stats, rows = ImageStats(), []
        # Headers without time and user make the same bytes from the same items. PAX allows names of any length.
        with TarWriter(file, encoder=False, mtime=0, user="", group="", format="PAX_FORMAT") as tar:
            for item, data in fetch(items, self.read):
                try:
                    data, extension = self._image(item, data, stats)
                except BadImage as e:
                    stats.drop(str(e), to_text(item.key))
                    continue
                label = {} if item.label < 0 else {"cls": str(item.label).encode()}
                meta = {} if item.meta is None else {"json": item.meta.encode()}
                tar.write({"__key__": item.key, extension: data, **label, **meta})
                row = to_text(item.key), f"{item.key}.{extension}", len(data), item.label, zlib.crc32(data), extension
                rows.append(row)
        keys, members, sizes, labels, crcs, extensions = zip(*rows, strict=True) if rows else ((),) * 6
        offsets = _offsets(file)
        columns = [keys, [offsets[m] for m in members], sizes, labels, crcs, [None] * len(rows), extensions]
        return stats, pa.table([pa.array(c, f.type) for c, f in zip(columns, STORED, strict=True)], STORED)

    def _image(self, item: Item, data: bytes | memoryview, stats: ImageStats) -> tuple[bytes | memoryview, str]:
        """Return the image file to write, which may be a smaller copy, and its extension, and count it in `stats`.

        Raises BadImage for an image to leave out."""
        if item.reason or not len(data):
            raise BadImage(item.reason or "the image has no bytes")
        if self.channels:
            height, width, _ = read_channels(data, self.channels).shape
        else:
            from eagleray.data.decode import decode

            height, width = (pixels := decode(data)).shape[1:]
        if min(height, width) < self.min_side:
            raise BadImage(f"shorter side below {self.min_side} pixels")
        extension = item.extension
        if self.max_side and max(height, width) > self.max_side:
            height, width = fit_within(height, width, self.max_side)
            data, extension = shrink_to_jpeg(pixels, height, width), "jpg"
        elif extension not in image_extensions():
            extension = EXTENSIONS.get(kind := image_format(data), kind.lower())
        stats.count(data, height, width)
        return data, extension


def shrink_to_jpeg(pixels: "Tensor", height: int, width: int) -> bytes:
    """Resize an image (3, H, W) and encode it as a JPEG."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((width, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, subsampling="4:4:4")
    return buffer.getvalue()


def put(url: str, source: Path) -> None:
    """Store a local file under a URL. Raises UserError when it cannot be written."""
    with writing(url):
        store.store(url).put(url, source, patience=PATIENCE)


def put_bytes(url: str, data: bytes) -> None:
    """Store bytes under a URL. Raises UserError when they cannot be written."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        put(url, Path(file.name))


def put_table(url: str, table: pa.Table) -> None:
    """Store a table as a Parquet file under a URL. Raises UserError when it cannot be written."""
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        pq.write_table(table, file.name, compression="zstd")
        put(url, Path(file.name))


def get_table(url: str) -> pa.Table | None:
    """Return the table that `put_table` stored under a URL, or None if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, pa.ArrowException):
        return pq.read_table(pa.BufferReader(store.store(url).get(url)))
    return None


def note_name(number: int) -> str:
    """Return the file name of a shard's note."""
    return f"shard-{number:06d}.parquet"


def write_note(url: str, note: ShardNote, plan: str) -> None:
    """Write the note of a shard: its rows as a table, and all other fields in the table's metadata."""
    blob = note.blob
    about = {"url": blob.url, "size": blob.size, "tag": blob.tag, "ends": note.ends, "plan": plan}
    about["census"] = note.stats.to_json()
    put_table(url, note.rows.replace_schema_metadata({"part": json.dumps(about)}))


def read_note(url: str, plan: str) -> ShardNote | None:
    """Return the note that `write_note` wrote under this plan, or None if it is missing, damaged or of another plan."""
    table = get_table(url)
    if table is None:
        return None
    try:
        about = json.loads(table.schema.metadata[b"part"])
        if about["plan"] != plan:
            return None
        blob = Blob(about["url"], about["size"], about["tag"])
        return ShardNote(blob, str(about["ends"]), table.cast(STORED), ImageStats.from_json(about["census"]))
    except (pa.ArrowException, KeyError, TypeError, ValueError):
        return None


def _offsets(file: "tempfile._TemporaryFileWrapper[bytes]") -> dict[str, int]:
    """Return the offset in bytes of each member's data in a tar that has just been written."""
    end = file.tell()
    offsets = {member.name: member.offset for member in members(cast(BinaryIO, file), end)}
    file.seek(end)
    return offsets
