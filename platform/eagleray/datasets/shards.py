"""Write WebDataset shards from images in memory."""

import io
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from eagleray.base.errors import UserError
from eagleray.base.files import writing
from eagleray.data.index import write_index
from eagleray.datasets.sources import files
from eagleray.storage import store
from eagleray.storage.shard_names import is_shard

SIZE = 128 * 2**20  # bytes of images per shard


@dataclass(frozen=True, slots=True)
class Sample:
    """An image file: its key, its extension, its bytes and, if it has one, its class."""

    key: str
    extension: str
    data: bytes
    label: int | None = None


def write_shards(samples: Iterable[Sample], destination: str, *, size: int = SIZE) -> tuple[int, int]:
    """Write `shard-000000.tar`, ... and `index.parquet` into a folder, local or s3://.

    Returns the number of shards and the number of samples. Raises UserError when the folder holds shards already, or
    when there is no sample."""
    destination = store.absolute(destination).rstrip("/")
    check_empty(destination)
    shards = count = 0
    for group in _groups(samples, size):
        _write(group, f"{destination}/shard-{shards:06d}.tar")
        shards, count = shards + 1, count + len(group)
    if not count:
        raise UserError(f"{destination}: there is no image to write")
    write_index(destination)
    return shards, count


def encode(picture: Image.Image) -> bytes:
    """Encode an image as a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def check_empty(destination: str) -> None:
    """Raise UserError when a folder holds shards already."""
    if any(is_shard(b.url) for b in files.list_folder(destination + "/")):
        raise UserError(f"{destination}: holds shards already; give another folder, or delete them first")


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    total = 0
    for sample in samples:
        if group and total + len(sample.data) > size:
            yield group
            group, total = [], 0
        group.append(sample)
        total += len(sample.data)
    if group:
        yield group


def _write(group: list[Sample], url: str) -> None:
    from webdataset import TarWriter

    with tempfile.NamedTemporaryFile() as file:
        # Headers without time and user make the same bytes from the same samples.
        with TarWriter(file, encoder=False, mtime=0, user="", group="", format="PAX_FORMAT") as tar:
            for s in group:
                label = {} if s.label is None else {"cls": str(s.label).encode()}
                tar.write({"__key__": s.key, s.extension: s.data, **label})
        file.flush()
        with writing(url):
            store.store(url).put(url, Path(file.name))
