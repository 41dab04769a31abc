"""Describe a choice of samples: count what is read and what is left out, and show random images of both."""

import contextlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index
from eagleray.reports.choice import Choice
from eagleray.reports.data_plots import Pixels, images_uri
from eagleray.runs.plan import Plan
from eagleray.storage.ordered_map import ordered_map

SHOWN, ACROSS = 24, 6  # largest number of images on a contact sheet, and in a row of it


def choice_of(kept: NDArray[np.bool_], sizes: tuple[int, int], index: Index, text: list[str]) -> Choice:
    """Describe which of an index's N samples are `kept` (N,). `sizes` are the bytes of the kept samples and of all."""
    ways = {"Kept": (kept, sizes[0]), "Left out": (~kept, sizes[1] - sizes[0])}
    rows = [[n.lower(), int(c.sum()), 100 * float(c.mean()), size / 1e9] for n, (c, size) in ways.items()]
    sheets = []
    for name, (chosen, _) in ways.items():
        images = [image for _, image in images_of(index, some_of(chosen))]
        sheets += [(name, images_uri(images, ACROSS))] if images else []
    return Choice("", [("How much is kept", ["", "Images", "%", "GB"], rows)], sheets, text)


def choice_of_plan(plan: Plan) -> Choice:
    """Describe which samples a run reads and how often, for a recipe that selects or weights samples. Raises ValueError
    for other recipes, and Outage when no images can be read."""
    index, selection = plan.index, plan.stream.selection
    if selection is None:
        raise ValueError("the recipe chooses nothing")
    rows, text = [], []
    for number, source in enumerate(dict.fromkeys(index.sources)):
        mine = np.concatenate(
            [selection.weight[index.first[i] : index.first[i + 1]] for i, s in enumerate(index.sources) if s == source]
        )
        readings = float(mine.sum(dtype=np.float64))
        rows.append(
            [
                source.url,
                len(mine),
                int(np.count_nonzero(mine)),
                readings,
                100 * readings / (selection.whole + selection.rest),
            ]
        )
        said = {k: v for k in ("where", "weight", "exclude", "share") if (v := getattr(source, k)) is not None}
        text += [f"{k} of source {number + 1}: {v}" for k, v in said.items()]
    whole = choice_of(selection.weight > 0, (selection.kept_bytes, selection.bytes), index, text)
    columns = ["Source", "Images", "Read", "Readings in an epoch", "% of an epoch"]
    tables = [*whole.tables, ("What each source gives", columns, rows)]
    if selection.left_out:
        urls = [source.url for source in dict.fromkeys(index.sources)]
        lost = [[url, *counts.values()] for url, counts in zip(urls, selection.left_out, strict=True)]
        tables.append(("What is left out, and why", ["Source", *selection.left_out[0]], lost))
    return Choice(selection.digest, tables, whole.sheets, text)


def some_of(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the indices, in ascending order, of up to SHOWN random samples of those that are `chosen` (N,)."""
    samples = np.flatnonzero(chosen)
    return np.sort(np.random.default_rng(0).choice(samples, min(SHOWN, len(samples)), replace=False))


def images_of(index: Index, samples: NDArray[np.int64]) -> Iterator[tuple[int, Pixels]]:
    """Yield index and image of each of the samples that decodes, without those that `eagleray forget` excludes."""
    numbers = [sample for sample in samples.tolist() if sample not in index.forgotten]
    for sample, data in zip(numbers, ordered_map(lambda n: index.read(n, n + 1), numbers), strict=True):
        with contextlib.suppress(BadImage):
            pixels = decode(data).permute(1, 2, 0).numpy()
            step = max(min(pixels.shape[:2]) // 600, 1)  # a map keeps 150 images, which may be photographs of 72 MB
            yield sample, pixels[::step, ::step].copy()
