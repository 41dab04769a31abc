"""Measure every image of a data set: size, brightness, sharpness and other columns for choosing samples.

The columns are a table beside the shards, which `data.train.where` finds. An image whose shorter side has more than 256
pixels is shrunk to 256 before its pixels are measured, so that the numbers of large and small images can be
compared."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray import config
from eagleray.base.cpu_share import cpus
from eagleray.base.errors import UserError
from eagleray.data.blocks import Block, Fetcher
from eagleray.data.columns import MEASURED
from eagleray.data.costs import BadImage
from eagleray.data.digests import data_digest, shard_digests
from eagleray.data.index import Index, open_index
from eagleray.data.sample_table import About, SampleTable, home_of, index_of
from eagleray.datasets import sidecars
from eagleray.storage.ordered_map import ordered_map

SIDE = 256  # largest shorter side, in pixels, of the images whose pixels are measured
Tick = Callable[[int, int], None]  # images done, and images in all


class Image(NamedTuple):
    """A decoded image, with smaller copies."""

    rgb: NDArray[np.uint8]  # (H, W, 3), in its own size
    small: NDArray[np.uint8]  # (h, w, 3), with a shorter side of at most SIDE
    grey: NDArray[np.uint8]  # (h, w), `small` in grey
    size: int  # bytes of the file


def _sides(image: Image) -> dict[str, float]:
    h, w = image.rgb.shape[:2]
    return {"width": w, "height": h, "min_side": min(h, w), "aspect": max(h, w) / min(h, w)}


def _luma(image: Image) -> dict[str, float]:
    dark, bright = np.percentile(image.grey, [99, 5])
    return {"luma": float(image.grey.mean()), "luma_p99": float(dark), "luma_p05": float(bright)}


def _entropy(image: Image) -> dict[str, float]:
    p = np.bincount(image.grey.ravel(), minlength=256) / image.grey.size
    return {"entropy": float(-(p[p > 0] * np.log2(p[p > 0])).sum())}


def phash(grey: NDArray[np.uint8]) -> str:
    """Return the perceptual hash of a grey image (h, w) in 16 hexadecimal digits. Its 63 bits say which coefficients of
    the DCT's lowest 8 x 8 frequencies, without the constant, are above their median."""
    small = cv2.resize(grey, (32, 32), interpolation=cv2.INTER_AREA).astype(np.float32)
    low = cv2.dct(small)[:8, :8].ravel()[1:]
    return f"{int(''.join('01'[bit] for bit in (low > np.median(low)).astype(int)), 2):016x}"


# For each measure: the function that computes its columns, and the meaning of each column.
MEASURES: dict[str, tuple[Callable[[Image], dict[str, Any]], dict[str, str]]] = {
    "size": (
        _sides,
        {
            "width": "pixels",
            "height": "pixels",
            "min_side": "pixels of the short side",
            "aspect": "long side divided by the short one",
        },
    ),
    "bytes_per_pixel": (
        lambda image: {"bytes_per_pixel": image.size / (image.rgb.shape[0] * image.rgb.shape[1])},
        {"bytes_per_pixel": "bytes of the file for each pixel: few where there is little to see"},
    ),
    "luma": (
        _luma,
        {
            "luma": "mean brightness, 0 to 255",
            "luma_p99": "brightness that 99 % of the pixels stay below: low in dark images",
            "luma_p05": "brightness that 5 % of the pixels stay below: high in bright images",
        },
    ),
    "sharpness": (
        lambda image: {"sharpness": float(cv2.Laplacian(image.grey, cv2.CV_32F).var())},
        {"sharpness": "variance of the Laplacian of the brightness: low in blurred images"},
    ),
    "entropy": (_entropy, {"entropy": "bits of the histogram of brightness, 0 to 8: low where there is little to see"}),
    "colour": (
        lambda image: {"colour": float(np.ptp(image.small, 2).mean())},
        {"colour": "mean distance of the largest from the smallest of red, green and blue: 0 in grey images"},
    ),
    "phash": (
        lambda image: {"phash": phash(image.grey)},
        {"phash": "hash of what is seen, 16 digits: equal for copies of other size and compression"},
    ),
}


@dataclass(frozen=True)
class Part:
    """A part of the table of measures, in the form in which it is sent to the process that computes it."""

    number: int
    table: SampleTable
    url: str


def measure(
    url: str,
    out: str | None,
    names: Sequence[str] = (),
    *,
    run: Callable[[Callable[[Part], int], Iterable[Part]], Iterator[int]],
    note: Callable[[str], None],
    tick: Tick,
) -> SampleTable:
    """Write measures of all images into the folder or URL `out`, by default beside the shards. `names` are measures, by
    default all; `json.NAME` is a field of the JSON beside each image. Existing parts are kept.

    Raises UserError for an unknown measure or field, and when `out` has another table, and Outage when a store does not
    answer."""
    names = names or list(MEASURES)
    measures = [name for name in names if not name.startswith(sidecars.PREFIX)]
    for name in measures:
        if name not in MEASURES:
            raise UserError(f"--columns {name}: unknown{config.nearest(name, list(MEASURES))}")
    fields = sidecars.fields_of(names, [column for name in measures for column in MEASURES[name][1]])
    index = open_index(url, note=note)
    settings: dict[str, Any] = {"measures": measures}
    if fields:
        settings["json"] = sidecars.kinds_of(index, fields)
    folder = out or f"{home_of(index)}/{MEASURED}/{'-'.join(names)}"
    data = data_digest(index, np.arange(len(index)))
    about = About(MEASURED, settings, data, len(index), shards=shard_digests(index))
    table = SampleTable.create(folder, about)
    missing = table.missing()
    done = len(index) - sum(len(table.samples(number)) for number in missing)
    tick(done, len(index))
    for number in run(measure_part, [Part(number, table, url) for number in missing]):
        done += len(table.samples(number))
        tick(done, len(index))
    for line in (*(undecoded(table) if measures else ()), *(sidecars.fault_lines(table) if fields else ())):
        note(line)
    return table


def undecoded(table: SampleTable) -> Iterator[str]:
    """Yield a line about the images of a table that could not be decoded, if there are any."""
    column = next(iter(MEASURES[table.about.settings["measures"][0]][1]))
    count, example = 0, ""
    for number in table.parts:
        values = table.read(number, [column])[column]
        if values.null_count and not count:
            names = table.read(number, ["shard", "key"]).filter(values.is_null())
            example = "/".join(str(names[name][0]) for name in ("shard", "key"))
        count += values.null_count
    if count:
        yield f"{count:,} of {table.about.images:,} images did not decode, such as {example}: their columns are null"


def measure_part(part: Part) -> int:
    """Measure the images of a part and write the part. Return the part's index."""
    index = index_of(part.url, part.table.about.data)
    samples = part.table.samples(part.number)
    names, fields = part.table.about.settings["measures"], part.table.about.settings.get("json")
    rows = list(_measured(index, samples, names)) if names else []
    columns = {column: pa.array([row.get(column) for row in rows]) for name in names for column in MEASURES[name][1]}
    if fields:
        columns |= sidecars.columns(index, samples, fields)
    part.table.write(part.number, index, columns)
    return part.number


def _measured(index: Index, samples: NDArray[np.int64], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the columns of the measures `names` for each sample, in order; none for an image that cannot be decoded."""
    cuts = np.searchsorted(samples, index.starts[(index.starts > samples[0]) & (index.starts <= samples[-1])])

    with contextlib.closing(Fetcher(index, cache=None)) as fetcher:

        def of_block(chunk: NDArray[np.int64]) -> list[dict[str, Any]]:
            block = Block(fetcher, chunk)
            return [_of(block, sample, names) for sample in chunk.tolist()]

        for rows in ordered_map(of_block, np.split(samples, cuts), width=2 * max(int(cpus()), 1)):
            yield from rows


def _of(block: Block, sample: int, names: Sequence[str]) -> dict[str, Any]:
    from eagleray.data.decode import decode

    with contextlib.suppress(BadImage):
        data = block.bytes(sample)
        image = of_pixels(np.ascontiguousarray(decode(data).permute(1, 2, 0).numpy()), len(data))
        return {column: value for name in names for column, value in MEASURES[name][0](image).items()}
    return {}


def of_pixels(rgb: NDArray[np.uint8], size: int) -> Image:
    """Return an image (H, W, 3), from a file of `size` bytes, with its smaller copies."""
    h, w = rgb.shape[:2]
    scale = min(SIDE / min(h, w), 1)
    shape = max(round(w * scale), 1), max(round(h * scale), 1)
    small: Any = cv2.resize(rgb, shape, interpolation=cv2.INTER_AREA) if scale < 1 else rgb
    grey: Any = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
    return Image(rgb, small, grey, size)
