"""Reads TIFF files with any number of channels and any type of values. No library that eagleray needs does that.

The format is TIFF 6.0 (Adobe 1992) with BigTIFF and the predictors of Adobe's supplements. Pillow decompresses what
zlib does not: each strip or tile is wrapped in a grey 8-bit TIFF."""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from eagleray.data.costs import BadImage, check_memory

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
LARGEST = 178_956_970  # most bytes of values, as many as Pillow's limit of pixels
MOST_PARTS = 65_536  # most strips or tiles of a page, each of which takes up to an eighth of a millisecond
MOST = 256  # most tags of a page, and most pages; damaged files may claim many millions
KINDS = {1: "u1", 3: "u2", 4: "u4", 16: "u8"}  # types of the tags that are read, and their NumPy types
SUBFILE, WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, FILL = 254, 256, 257, 258, 259, 262, 266
STRIPS, ORIENTATION, SAMPLES, ROWS, STRIP_SIZES, PLANAR, PREDICTOR = 273, 274, 277, 278, 279, 284, 317
TILE_WIDTH, TILE_HEIGHT, TILES, TILE_SIZES, FORMAT = 322, 323, 324, 325, 339
# Compression methods that zlib reads, and that Pillow reads: LZW, PackBits, LZMA, Zstandard.
DEFLATE, OF_PILLOW = (8, 32946), (5, 32773, 34925, 50000)
USUAL = {FILL: "order of bits", ORIENTATION: "orientation"}  # tags for which only the value 1 is read
Data = bytes | memoryview
Tags = dict[int, NDArray[Any]]


def read_tiff(data: Data, channels: int | None = None) -> NDArray[Any]:
    """Return the values (H, W, N) of a TIFF: those of its first page or, if that has one channel, of all full-size
    pages, one channel each. `channels` is the expected number. If it is 1, only the first page is read.

    Raises BadImage, and any error that damaged bytes cause."""
    pages = directories(data)
    first = TiffPage.of(next(pages))
    if first.samples > 1 or channels == 1:
        first.check(len(data))
        return first.read(data)
    whole = [first, *(TiffPage.of(tags) for tags in pages if not tags.get(SUBFILE, np.zeros(1, int))[0] & 5)]
    if channels and len(whole) != channels:
        raise BadImage(f"{len(whole)} channel{'s' * (len(whole) > 1)}, expected {channels}")
    if any((page.shape, page.dtype, page.samples) != (first.shape, first.dtype, 1) for page in whole):
        raise BadImage("a TIFF whose pages differ in size or in the type of their values")
    if len(whole) * first.bytes > LARGEST:
        raise BadImage(f"{len(whole)} pages of {first.bytes} bytes of values, expected {LARGEST} bytes at most")
    first.check(len(data), len(whole))
    return np.concatenate([page.read(data) for page in whole], 2)


def directories(data: Data) -> Iterator[Tags]:
    """Yield the tags of each page by their numbers, only those with values of whole numbers. The key -1 has whether the
    bytes are in little-endian order."""
    order, big = "<" if data[:2] == b"II" else ">", 43 in bytes(data[2:4])
    offset, length = (f"{order}u8", f"{order}u8") if big else (f"{order}u4", f"{order}u2")
    width = int(offset[-1])  # bytes of an offset, and of a value stored beside its tag

    def number(kind: str, at: int) -> int:
        return int(np.frombuffer(data, kind, 1, at)[0])

    entry = np.dtype([("tag", f"{order}u2"), ("kind", f"{order}u2"), ("count", offset), ("value", f"V{width}")])
    at, seen = number(offset, width), set[int]()
    while at and at not in seen:
        seen.add(at)
        count = number(length, at)
        if max(count, len(seen)) > MOST:
            raise BadImage(f"a TIFF of {count} tags on page {len(seen)}, expected {MOST} of either at most")
        at += int(length[-1])
        tags: Tags = {-1: np.array([order == "<"])}
        for i, (tag, kind, n, _) in enumerate(np.frombuffer(data, entry, count, at).tolist()):
            if kind in KINDS and n:
                place = at + (i + 1) * entry.itemsize - width
                inside = n * int(KINDS[kind][1]) <= width
                tags[tag] = np.frombuffer(data, order + KINDS[kind], n, place if inside else number(offset, place))
        yield tags
        at = number(offset, at + count * entry.itemsize)


@dataclass(frozen=True, kw_only=True)
class TiffPage:
    """One page of a TIFF. Its values are in strips or tiles."""

    shape: tuple[int, int]  # height and width in pixels
    samples: int  # channels
    dtype: np.dtype[Any]
    tiled: bool
    part: tuple[int, int]  # rows and columns of a strip or tile
    planar: bool  # whether each channel has its own strips or tiles
    compression: int
    predictor: int
    inverted: bool  # whether 0 is white
    offsets: NDArray[Any]  # (n,) first byte of each strip or tile in the file
    sizes: NDArray[Any]  # (n,) bytes of each strip or tile in the file

    @classmethod
    def of(cls, tags: Tags) -> "TiffPage":
        """Return the page that some tags describe. Raises BadImage for one that is too large or not supported."""

        def one(tag: int, default: int | None = None) -> int:
            if tag not in tags and default is None:
                raise BadImage(f"a TIFF without its tag {tag}")
            return int(tags[tag][0]) if tag in tags else default or 0

        for tag, what in USUAL.items():
            if one(tag, 1) != 1:
                raise BadImage(f"a TIFF with the {what} {one(tag)}, of which only 1 is read")
        height, width, samples = one(HEIGHT), one(WIDTH), one(SAMPLES, 1)
        tiled, planar = TILE_WIDTH in tags, one(PLANAR, 1) == 2 and samples > 1
        rows, columns = (one(TILE_HEIGHT), one(TILE_WIDTH)) if tiled else (min(one(ROWS, height), height), width)
        dtype = value_type(tags)
        parts = -(-height // max(rows, 1)) * -(-width // max(columns, 1)) * (samples if planar else 1)
        size = max(parts * rows * columns * (1 if planar else samples), height * width * samples) * dtype.itemsize
        if not 0 < size <= LARGEST or not rows * columns:
            raise BadImage(f"{width} x {height} pixels of {samples} channels, more than {LARGEST} bytes of values")
        if one(PHOTOMETRIC, 1) == 3:
            raise BadImage("a TIFF with a palette, expected channels")
        offsets, sizes = (
            tags.get(tag, np.zeros(0)) for tag in ((TILES, TILE_SIZES) if tiled else (STRIPS, STRIP_SIZES))
        )
        if not len(offsets) == len(sizes) == parts:
            raise BadImage(f"a TIFF with {len(offsets)} strips or tiles, expected {parts}")
        if parts > MOST_PARTS:
            raise BadImage(f"a TIFF of {parts} strips or tiles, expected {MOST_PARTS} at most")
        return cls(
            shape=(height, width),
            samples=samples,
            dtype=dtype,
            tiled=tiled,
            part=(rows, columns),
            planar=planar,
            compression=one(COMPRESSION, 1),
            predictor=one(PREDICTOR, 1),
            inverted=one(PHOTOMETRIC, 1) == 0 and dtype.kind == "u",
            offsets=offsets,
            sizes=sizes,
        )

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.samples * self.dtype.itemsize

    def check(self, size: int, pages: int = 1) -> None:
        """Raise BadImage if this page and `pages` - 1 like it take too much memory for a file of `size` bytes: the
        values and levels of all channels, and one channel as floating-point numbers."""
        (height, width), samples = self.shape, self.samples * pages
        need = height * width * (samples * (self.dtype.itemsize + 1) + 8)
        check_memory(f"{width} x {height} pixels of {samples} channels", need, size)

    def read(self, data: Data) -> NDArray[Any]:
        """Return the values (H, W, N) in the byte order of this machine."""
        (height, width), (rows, columns) = self.shape, self.part
        across = -(-width // columns)
        per_plane = len(self.offsets) // (self.samples if self.planar else 1)
        out = np.empty((height, width, self.samples), self.dtype.newbyteorder("="))
        for i, (offset, size) in enumerate(zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)):
            plane, place = divmod(i, per_plane)
            top, left = place // across * rows, place % across * columns
            high = rows if self.tiled else min(rows, height - top)  # a tile has all its rows, the last strip has fewer
            target = out[top : top + rows, left : left + columns, plane : plane + 1 if self.planar else None]
            target[:] = self._values(data[offset : offset + size], high)[: target.shape[0], : target.shape[1]]
        return np.iinfo(out.dtype).max - out if self.inverted else out

    def _values(self, part: Data, rows: int) -> NDArray[Any]:
        """Return the values (rows, columns, samples) of a strip or tile."""
        samples, size = 1 if self.planar else self.samples, self.dtype.itemsize
        shape = rows, self.part[1], samples
        content = decompress(part, self.compression, rows, self.part[1] * samples * size)
        if self.predictor == 3 and self.dtype.kind == "f":  # byte differences, the highest bytes of all values first
            differences = np.frombuffer(content, np.uint8).reshape(rows, -1, samples)
            planes = differences.cumsum(1, np.uint8).reshape(rows, size, -1)
            return np.ascontiguousarray(planes.transpose(0, 2, 1)).view(f">f{size}").reshape(shape)
        if self.predictor == 2:
            differences = np.frombuffer(content, f"{self.dtype.byteorder}u{size}").reshape(shape)
            return differences.cumsum(1, f"u{size}").view(self.dtype.newbyteorder("="))
        if self.predictor != 1:
            raise BadImage(f"a TIFF with the predictor {self.predictor}, which is not read")
        return np.frombuffer(content, self.dtype).reshape(shape)


def value_type(tags: Tags) -> np.dtype[Any]:
    """Return the type of the values, in the byte order of the file. Raises BadImage for an unsupported type."""
    bits, formats = (sorted(set(tags.get(tag, np.ones(1, int)).tolist())) for tag in (BITS, FORMAT))
    kind = {1: "u", 2: "i", 3: "f"}.get(formats[0], "")
    if (
        len(bits) > 1
        or len(formats) > 1
        or not kind
        or bits[0] not in ((16, 32, 64) if kind == "f" else (8, 16, 32, 64))
    ):
        raise BadImage(
            f"a TIFF with values of {'/'.join(map(str, bits))} bits in the format {'/'.join(map(str, formats))}"
        )
    return np.dtype(f"{'<' if tags[-1][0] else '>'}{kind}{bits[0] // 8}")


def decompress(part: Data, compression: int, rows: int, width: int) -> Data:
    """Return the bytes of a strip or tile, `width` bytes per row. Raises BadImage if cut off or not supported."""
    if compression == 1:
        content: Data = part[: rows * width]
    elif compression in DEFLATE:
        content = zlib.decompressobj().decompress(part, rows * width)
    elif compression in OF_PILLOW:
        with Image.open(io.BytesIO(grey_tiff(part, compression, rows, width)), formats=("TIFF",)) as image:
            content = image.tobytes()
    else:
        raise BadImage(f"a TIFF compressed by the method {compression}, expected none, Deflate, LZW or Zstandard")
    if len(content) < rows * width:
        raise BadImage(f"a TIFF that is cut off: {len(content)} of {rows * width} bytes")
    return content


def grey_tiff(part: Data, compression: int, rows: int, width: int) -> bytes:
    """Return a grey 8-bit TIFF of `rows` x `width` pixels whose only strip has these compressed bytes."""
    tags = {WIDTH: width, HEIGHT: rows, BITS: 8, COMPRESSION: compression, PHOTOMETRIC: 1, STRIPS: 8, SAMPLES: 1}
    tags |= {ROWS: rows, STRIP_SIZES: len(part)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    padding = b"\0" * (len(part) % 2)
    head = struct.pack("<2sHI", b"II", 42, 8 + len(part) + len(padding))
    return head + bytes(part) + padding + struct.pack("<H", len(tags)) + entries + bytes(4)


def write_pages(file: Path | BinaryIO, values: NDArray[np.float32]) -> None:
    """Write values (H, W, N) as a TIFF with one page per channel, as Pillow cannot write many channels otherwise."""
    first, *others = (Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(values, 2, 0))
    first.save(file, "TIFF", save_all=True, append_images=others)
