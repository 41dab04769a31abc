"""One shard from its items: a pure function of what is asked, so whoever writes it again writes the same bytes."""

import io
import json
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.data.decode import BadImage, decode
from eagleray.data.index_file import SCHEMA
from eagleray.data.tar_scan import image_extensions
from eagleray.datasets.sources.fetch import fetch
from eagleray.datasets.sources.item import Item
from eagleray.datasets.stats import Census, fitted, format_of
from eagleray.storage import store
from eagleray.storage.blob import Blob

QUALITY = 95  # of a JPEG that was made smaller; its colours are not subsampled
EXTENSIONS = {"JPEG": "jpg", "JPEG2000": "jp2"}  # of formats that are not called as their files
NOTES = ".prepare"  # the folder in the destination that says what is done, gone at the end


@dataclass(frozen=True)
class Part:
    """A shard that is written: its place, what the index says of it, and what is in it."""

    blob: Blob  # of size 0 where no image was left, and then there is no file
    rows: pa.Table  # SCHEMA
    census: Census


@dataclass(frozen=True)
class Pack:
    """Writes a shard and, after it, the note that says so."""

    destination: str
    column: str
    max_side: int
    min_side: int

    def __call__(self, task: tuple[int, bytes]) -> int:
        """Number and items of a shard; returns how many these were."""
        number, packed = task
        items = pa.ipc.open_stream(packed).read_all()
        url = f"{self.destination}/shard-{number:06d}.tar"
        with tempfile.NamedTemporaryFile() as file:
            census, rows = self._write(items, file)
            file.flush()
            size = file.tell() if census.images else 0
            if size:
                put(url, Path(file.name))
        note(f"{self.destination}/{NOTES}/{note_name(number)}", Part(Blob(url, size), rows, census))
        return len(items)

    def _write(self, items: pa.Table, file: "tempfile._TemporaryFileWrapper[bytes]") -> tuple[Census, pa.Table]:
        from webdataset import TarWriter

        census, written = Census(), []
        # Without a clock and a user in the headers, the same items make the same bytes. PAX takes any length of name.
        with TarWriter(file, encoder=False, mtime=0, user="", group="", format="PAX_FORMAT") as tar:
            for item, data in fetch(items, self.column):
                try:
                    data, extension = self._image(item, data, census)
                except BadImage as e:
                    census.drop(str(e), item.key)
                    continue
                label = {} if item.label < 0 else {"cls": str(item.label).encode()}
                meta = {} if item.meta is None else {"json": item.meta.encode()}
                tar.write({"__key__": item.key, extension: data, **label, **meta})
                written.append((item.key, f"{item.key}.{extension}", len(data), item.label, zlib.crc32(data)))
        keys, members, sizes, labels, crcs = zip(*written, strict=True) if written else ((),) * 5
        offsets = _offsets(file)
        columns = [keys, [offsets[m] for m in members], sizes, labels, crcs, [None] * len(written)]
        return census, pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)

    def _image(self, item: Item, data: bytes | memoryview, census: Census) -> tuple[bytes | memoryview, str]:
        """The bytes to write and their extension. Raises BadImage for what is left out."""
        if not len(data):
            raise BadImage("the image has no bytes")
        pixels = decode(data)
        height, width = pixels.shape[1:]
        if min(height, width) < self.min_side:
            raise BadImage(f"shorter side below {self.min_side} pixels")
        extension = item.extension
        if self.max_side and max(height, width) > self.max_side:
            height, width = fitted(height, width, self.max_side)
            data, extension = smaller(pixels, height, width), "jpg"
        elif extension not in image_extensions():
            extension = EXTENSIONS.get(kind := format_of(data), kind.lower())
        census.count(data, height, width)
        return data, extension


def smaller(pixels: torch.Tensor, height: int, width: int) -> bytes:
    """An image (3, H, W) as a JPEG of this size."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((width, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, subsampling="4:4:4")
    return buffer.getvalue()


def put(url: str, source: Path) -> None:
    try:
        store.store(url).put(url, source)
    except OSError as e:
        raise UserError(f"{url}: cannot be written: {e.strerror or e}") from None


def put_bytes(url: str, data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        put(url, Path(file.name))


def put_table(url: str, table: pa.Table) -> None:
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        pq.write_table(table, file.name, compression="zstd")
        put(url, Path(file.name))


def note_name(number: int) -> str:
    return f"shard-{number:06d}.parquet"


def note(url: str, part: Part) -> None:
    about = {"url": part.blob.url, "size": part.blob.size, "census": part.census.plain()}
    put_table(url, part.rows.replace_schema_metadata({"part": json.dumps(about)}))


def noted(url: str) -> Part:
    table = pq.read_table(pa.BufferReader(store.store(url).get(url)))
    about = json.loads(table.schema.metadata[b"part"])
    return Part(Blob(about["url"], about["size"]), table.cast(SCHEMA), Census.of(about["census"]))


def _offsets(file: "tempfile._TemporaryFileWrapper[bytes]") -> dict[str, int]:
    """Where each member's bytes begin in the tar that has just been written."""
    end = file.tell()
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        found = {m.name: m.offset_data for m in tar}
    file.seek(end)
    return found
