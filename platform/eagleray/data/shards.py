"""WebDataset shards from samples, and samples from a folder of images."""

import io
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from eagleray.data import store
from eagleray.data.index import write_index
from eagleray.data.scan import image_extensions
from eagleray.errors import UserError

SIZE = 128 * 2**20  # bytes of images per shard


@dataclass(frozen=True, slots=True)
class Sample:
    """One image file as it is, its key, extension and, where it has one, class."""

    key: str
    extension: str
    data: bytes
    label: int | None = None


def write_shards(samples: Iterable[Sample], destination: str, *, size: int = SIZE) -> tuple[int, int]:
    """Write `shard-000000.tar` ... and `index.parquet` into a folder, local or s3://. Returns shards and samples.

    Raises UserError when there are shards already, or when there is no sample.
    """
    destination = store.absolute(destination).rstrip("/")
    _check_empty(destination)
    shards = written = 0
    for group in _groups(samples, size):
        _write(group, f"{destination}/shard-{shards:06d}.tar")
        shards, written = shards + 1, written + len(group)
    if not written:
        raise UserError(f"{destination}: there is no image to write")
    write_index(destination)
    return shards, written


def encode(picture: Image.Image) -> bytes:
    """A picture made in memory as the bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _check_empty(destination: str) -> None:
    try:
        if any(b.url.endswith(".tar") for b in store.store(destination).list(destination + "/")):
            raise UserError(f"{destination}: holds shards already; give another folder, or delete them first")
    except UserError:
        if destination.startswith("s3:") or Path(destination).exists():
            raise


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    held = 0
    for sample in samples:
        if group and held + len(sample.data) > size:
            yield group
            group, held = [], 0
        group.append(sample)
        held += len(sample.data)
    if group:
        yield group


def _write(group: list[Sample], url: str) -> None:
    from webdataset import TarWriter

    with tempfile.NamedTemporaryFile() as file:
        # Without a clock and a user in the headers, the same samples make the same bytes.
        with TarWriter(file, encoder=False, mtime=0, user="", group="") as tar:
            for s in group:
                label = {} if s.label is None else {"cls": str(s.label).encode()}
                tar.write({"__key__": s.key, s.extension: s.data, **label})
        file.flush()
        try:
            store.store(url).put(url, Path(file.name))
        except OSError as e:
            raise UserError(f"{url}: cannot be written: {e.strerror or e}") from None


@dataclass(frozen=True)
class Images:
    """The image files below a folder, in the shuffled order in which they are written."""

    folder: Path
    files: list[Path]
    classes: list[str]  # the folders directly below, where every image is in one

    @classmethod
    def below(cls, folder: Path, *, seed: int = 0) -> "Images":
        """Raises UserError when there are none."""
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        files = sorted(p for p in folder.rglob("*") if p.suffix[1:].lower() in image_extensions() and p.is_file())
        if not files:
            raise UserError(f"{folder}: no image files below it")
        tops = {p.relative_to(folder).parts[0] for p in files}
        classes = sorted(tops) if all((folder / top).is_dir() for top in tops) and len(tops) > 1 else []
        order = np.random.default_rng(seed).permutation(len(files))
        return cls(folder, [files[i] for i in order], classes)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, skip: Callable[[Path, str], Any]) -> Iterator[Sample]:
        """The files' bytes as they are; `skip` is told of those that no image can be made of."""
        taken: set[str] = set()
        for path in self.files:
            relative = path.relative_to(self.folder)
            try:
                data = path.read_bytes()
                with Image.open(path):
                    pass
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
                skip(path, " ".join(str(e).split()))
                continue
            stem = str(relative.with_suffix("")).replace(".", "_")  # webdataset ends a key at its first dot
            names = itertools.chain([stem], (f"{stem}~{again}" for again in itertools.count(2)))
            key = next(name for name in names if name not in taken)
            taken.add(key)
            label = self.classes.index(relative.parts[0]) if self.classes else None
            yield Sample(key, path.suffix[1:].lower(), data, label)
