"""Writes TIFF files of any number of channels, and shards of them."""

import itertools
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from helpers.pictures import write_tar
from numpy.typing import NDArray

BANDS = 5
MEANS, STDS = 500.0 * np.arange(1, BANDS + 1), 40.0 * np.arange(1, BANDS + 1)  # of `scene`
CHANNELS = [{"mean": float(m), "std": float(s)} for m, s in zip(MEANS, STDS, strict=True)]


def tiff(
    values: NDArray[Any],
    *,
    planar: bool = False,
    deflate: bool = False,
    predictor: int = 1,
    tile: int = 0,
    rows: int = 0,
    order: str = "<",
    big: bool = False,
    **tags: int,
) -> bytes:
    """Encode values (H, W, N) as a TIFF. `tile` is the side of a tile, `rows` are those of a strip. `tags`, named as in
    `t262=0`, replace others."""
    parts = [part for plane in planes_of(values, planar) for part in parts_of(plane, tile, rows)]
    data = [encode(part, predictor, order) for part in parts]
    data = [zlib.compress(part) for part in data] if deflate else data
    height, width, channels = values.shape
    size, word = (8, "Q") if big else (4, "I")
    body, offsets = b"", []
    for part in data:
        offsets.append(len(body) + (16 if big else 8))
        body += part + b"\0" * (len(part) % 2)
    bits, kind = values.dtype.itemsize * 8, {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    fields = {256: [width], 257: [height], 258: [bits] * channels, 259: [8 if deflate else 1], 262: [1]}
    fields |= {277: [channels], 284: [2 if planar else 1], 317: [predictor], 339: [kind] * channels}
    places, sizes = (324, 325) if tile else (273, 279)
    fields |= {places: offsets, sizes: [len(part) for part in data]}
    fields |= {322: [tile], 323: [tile]} if tile else {278: [rows or height]}
    fields |= {int(name[1:]): [value] for name, value in tags.items()}
    entries, extra, start = b"", b"", len(body) + (16 if big else 8)
    after = start + (8 if big else 2) + len(fields) * (20 if big else 12) + size
    for tag, numbers in sorted(fields.items()):
        packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
        value = packed.ljust(size, b"\0") if len(packed) <= size else struct.pack(order + word, after + len(extra))
        extra += b"" if len(packed) <= size else packed
        entries += struct.pack(f"{order}HH{word}", tag, 4, len(numbers)) + value
    name = b"II" if order == "<" else b"MM"
    head = name + (struct.pack(f"{order}HHHQ", 43, 8, 0, start) if big else struct.pack(f"{order}HI", 42, start))
    count = struct.pack(order + ("Q" if big else "H"), len(fields))
    return head + body + count + entries + bytes(size) + extra


def planes_of(values: NDArray[Any], planar: bool) -> list[NDArray[Any]]:
    return np.split(values, values.shape[2], 2) if planar else [values]


def parts_of(plane: NDArray[Any], tile: int, rows: int) -> list[NDArray[Any]]:
    """The strips or tiles of one plane (H, W, N), row by row. Tiles at the ends are filled with the edge's values."""
    height, width, _ = plane.shape
    if not tile:
        return [plane[top : top + (rows or height)] for top in range(0, height, rows or height)]
    padded = np.pad(plane, ((0, -height % tile), (0, -width % tile), (0, 0)), mode="edge")
    corners = itertools.product(range(0, height, tile), range(0, width, tile))
    return [padded[top : top + tile, left : left + tile] for top, left in corners]


def encode(part: NDArray[Any], predictor: int, order: str) -> bytes:
    """The bytes of a strip or tile (h, w, N) before compression, as differences where there is a predictor."""
    if predictor == 2:
        part = np.diff(part, axis=1, prepend=np.zeros_like(part[:, :1]))
    if predictor == 3:
        h, _, n = part.shape
        planes = part.astype(part.dtype.newbyteorder(">")).view(np.uint8).reshape(h, -1, part.itemsize)
        by_byte = planes.transpose(0, 2, 1).reshape(h, -1, n)
        return np.diff(by_byte, axis=1, prepend=np.zeros_like(by_byte[:, :1])).tobytes()
    return part.astype(part.dtype.newbyteorder(order)).tobytes()


def scene(seed: int, size: int = 32) -> NDArray[np.uint16]:
    """Values (H, W, N) of 16 bits that have the means and deviations of CHANNELS; the class, the seed modulo 3, is in
    the mean."""
    rng = np.random.default_rng(seed)
    values = MEANS + STDS * (rng.normal(0, 0.8, (size + seed % 5, size, BANDS)) + 0.6 * np.eye(BANDS)[seed % 3])
    return np.rint(values).clip(0, 65_535).astype(np.uint16)


def write_scenes(folder: Path, count: int, broken: int = 0) -> Path:
    """Write a shard of labelled scenes, the first of which have a channel less."""
    folder.mkdir(parents=True, exist_ok=True)
    members = []
    for n in range(count):
        values = scene(n)[..., : BANDS - 1] if n < broken else scene(n)
        members += [(f"s{n:04d}.tif", tiff(values, planar=n % 2 == 1, deflate=n % 3 == 1))]
        members += [(f"s{n:04d}.cls", b"%d" % (n % 3))]
    write_tar(folder / "shard-000000.tar", members)
    return folder
