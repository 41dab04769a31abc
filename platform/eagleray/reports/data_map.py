"""Write a page on a data set: a map of its features, its clusters and near copies, the images with the extreme values
of each column, and what an expression would keep and leave out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from eagleray.base import files
from eagleray.curation.cuts import Cut
from eagleray.data import sample_table
from eagleray.data.columns import MEASURED, UNTYPED, samples_where
from eagleray.data.digests import same_shards
from eagleray.data.index import Index
from eagleray.data.sample_table import SampleTable, complete_tables
from eagleray.evaluation.embeddings import beside, read_features
from eagleray.reports.data_plots import histogram_uri, images_uri, map_uri, principal
from eagleray.reports.draw_choice import ACROSS, choice_of, images_of, some_of
from eagleray.reports.page import Page, Picture, Pictures, Section, Table, Tile, check_page, footer_text, render

PARTS = 12  # largest number of parts of the tables that are read, evenly spread
POINTS, ON_MAP = 3000, 150  # largest numbers of points on the map, and of images among them
ENDS, EACH, PAIRS = 8, 8, 12  # largest numbers: images at an end of a column, images of a cluster, near copies
CLUSTERS = 12  # how many of the largest and of the smallest clusters are shown


@dataclass(frozen=True)
class Data:
    """A data set with its measured columns and features. The page shows only a subset of its samples."""

    url: str
    index: Index
    columns: Sequence[SampleTable]
    features: SampleTable | None

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        """Return the indices of the samples in the subset: those in up to PARTS parts of the tables."""
        size = sample_table.ROWS
        parts = np.unique(np.linspace(0, (len(self.index) - 1) // size, PARTS).round().astype(np.int64))
        return np.concatenate([np.arange(p * size, min((p + 1) * size, len(self.index))) for p in parts])

    @cached_property
    def table(self) -> pa.Table:
        """Return a table of all measured columns, with the samples in the subset as rows."""
        parts = np.unique(self.samples // sample_table.ROWS).tolist()
        found: dict[str, Any] = {}
        for table in sorted(self.columns, key=lambda t: "clusters" in t.about.settings):  # the last `similarity` counts
            read = pa.concat_tables([table.read(part, table.columns()) for part in parts], promote_options=UNTYPED)
            found |= {name: read[name] for name in table.columns()}
        return pa.table(found)

    def column(self, name: str) -> NDArray[np.float64]:
        """Return the values of a numeric column for the samples in the subset, NaN where a sample has none."""
        return self.table[name].cast(pa.float64()).fill_null(np.nan).to_numpy()

    def sheet(self, samples: NDArray[np.int64], alt: str, caption: str, columns: int = 4) -> Picture | None:
        """Return a contact sheet of the images of `samples`, or None if no image can be decoded."""
        images = [image for _, image in images_of(self.index, samples)]
        return Picture(images_uri(images, columns), alt, caption) if images else None


def group(pictures: Iterable[Picture | None]) -> Pictures:
    """Return a group of the pictures that are not None."""
    return Pictures([picture for picture in pictures if picture])


def data_map(
    url: str,
    index: Index,
    out: Path,
    *,
    features: SampleTable | None,
    where: str,
    columns: str,
    first: Sequence[Section] = (),
) -> None:
    """Write the page to `out`, with the sections `first` at its beginning. `where` is an expression to preview, and
    `columns` a file with columns for it. `features` None: an embedding beside the shards is used, if there is one.
    Raises UserError for a wrong expression, and when the page cannot be written."""
    files.check_local("--out", out)
    check_page("--out ", out, url)
    tables = list(complete_tables(index.shards, MEASURED, lambda about: same_shards(index, about.shards)))
    data = Data(url, index, tables, features or beside(index, {}))
    sections = [*first, preview(data, where, columns), on_map(data), clusters(data), copies(data), ends(data)]
    page = Page(
        title=f"Data set {url.rstrip('/').rpartition('/')[2]}",
        lead=lead(data),
        sections=[section for section in sections if section],
        footer=footer_text(url.rstrip("/")),
        tiles=[Tile("images", len(index)), *[Tile("shards", index.packed)] * bool(index.packed), *tiles(data)],
    )
    with files.writing(str(out)):
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(out, render(page))


def lead(data: Data) -> list[str]:
    """Return the first lines of the page: how many images it is made from, and which commands would add sections."""
    some, images = len(data.samples), len(data.index)
    looked = f"{some:,} of {images:,} images are looked at." if some < images else ""
    missing = {
        f"eagleray data measure {data.url}": "sharpness" in data.table.column_names,
        f"eagleray embed MODEL {data.url}": data.features is not None,
        f"eagleray data cluster FEATURES {data.url}": "centre_similarity" in data.table.column_names,
    }
    more = [command for command, there in missing.items() if not there]
    return [line for line in (looked, f"More is shown after: {'; '.join(more)}" if more else "") if line]


def tiles(data: Data) -> list[Tile]:
    """Return the large numbers at the top of the page: how many clusters and near copies there are, as far as known."""
    found = []
    if "centre_similarity" in data.table.column_names:
        found.append(Tile("clusters", int(np.nanmax(data.column("cluster"), initial=-1)) + 1))
        copied = len(data.table) - data.table["duplicate_of"].null_count
        found.append(Tile("near copies", 100 * copied / len(data.table), "% of the images"))
    return found


def preview(data: Data, where: str, columns: str) -> Section | None:
    """Return a section on what `where` keeps and leaves out; None if it is empty. Raises UserError if it is wrong."""
    if not where:
        return None
    of_shards = zip(*samples_where(data.index, data.url, where, columns), strict=True)
    kept, size = (np.concatenate(parts) for parts in of_shards)
    sizes = int(size[kept].sum()), int(size.sum())
    return choice_of(kept, sizes, data.index, [f"where: {where}"]).section("Preview")


def on_map(data: Data) -> Section | None:
    """Return a section with a map of the features, or None if there are no features."""
    if data.features is None:
        return None
    draw = np.random.default_rng(0)
    rows = np.sort(draw.choice(len(data.samples), min(POINTS, len(data.samples)), replace=False))
    features, good = read_features(data.features, data.samples[rows])
    good &= np.isfinite(features).all(1)
    rows = rows[good]
    if not len(rows):
        return None
    places = principal(features[good] / np.linalg.norm(features[good], axis=1, keepdims=True).clip(1e-12))
    names = [f.name for f in data.table.schema if f.name.startswith("cluster") and f.type == pa.int64()]
    highest = max(names, key=lambda name: (len(name), name), default=None)
    colour = np.nan_to_num(data.column(highest)[rows]).astype(np.int64) if highest else np.zeros(len(rows), np.int64)
    shown = np.sort(draw.choice(len(rows), min(ON_MAP, len(rows)), replace=False))
    at = {int(data.samples[rows[i]]): int(i) for i in shown}
    images = [(at[sample], image) for sample, image in images_of(data.index, data.samples[rows[shown]])]
    of = f"colours are those of {highest}" if highest else "all in one colour, as there are no clusters yet"
    caption = f"{len(rows):,} images by the two principal components of their features; {of}."
    picture = Picture(map_uri(places[:, 0], places[:, 1], colour, images), "A map of the images", caption)
    return Section("Map", [Pictures([picture], large=True)], [data.features.about.note])


def clusters(data: Data) -> Section | None:
    """Return a section with contact sheets of the largest and smallest clusters, or None without a cluster column."""
    if "centre_similarity" not in data.table.column_names:
        return None
    of, size, near = (data.column(name) for name in ("cluster", "cluster_size", "centre_similarity"))
    numbers, first = np.unique(of[~np.isnan(of)], return_index=True)
    sizes = size[~np.isnan(of)][first]
    order = np.argsort(-sizes, kind="stable")
    few = len(order) <= 2 * CLUSTERS
    groups = {"All": order} if few else {"Largest": order[:CLUSTERS], "Smallest": order[-CLUSTERS:]}
    blocks: list[Pictures] = []
    for name, chosen in groups.items():
        pictures = []
        for number, count in zip(numbers[chosen], sizes[chosen], strict=True):
            rows = np.flatnonzero(of == number)
            spread = rows[np.argsort(-near[rows])][np.linspace(0, len(rows) - 1, min(EACH, len(rows))).astype(int)]
            said = f"cluster {number:.0f}: {count:,.0f} images" + ("" if few else f" ({name.lower()})")
            pictures.append(data.sheet(data.samples[spread], f"Images of cluster {number:.0f}", said))
        blocks.append(group(pictures))
    text = (
        "Of each cluster, from the image nearest to its centre to the one farthest from it. Near copies do not count."
    )
    return Section("Clusters", blocks, [text])


def copies(data: Data) -> Section | None:
    """Return a section with pairs of an image and its near copy, or None if there are no near copies."""
    if "centre_similarity" not in data.table.column_names:
        return None
    original, similar = data.table["duplicate_of"], data.column("similarity")
    copied = np.flatnonzero(original.is_valid().to_numpy())
    copied = copied[np.argsort(similar[copied], kind="stable")]
    if not len(copied):
        return None
    pictures = []
    for row in copied[np.unique(np.linspace(0, len(copied) - 1, PAIRS).astype(int))].tolist():
        name = original[row].as_py()
        pair = np.array([sample_of(data.index, name), data.samples[row]])
        said = f"cosine similarity {similar[row]:.4f}: {name}, and its copy {data.index.key(int(pair[1]))}"
        pictures.append(data.sheet(pair, "An image and its near copy", said, columns=2))
    text = [f"{len(copied):,} of {len(data.table):,} images are near copies. From the least similar pair to the most."]
    return Section("Near copies", [group(pictures)], text)


def sample_of(index: Index, name: str) -> int:
    """Return the index of the sample SHARD/KEY, a value of the column duplicate_of."""
    tar, _, key = name.partition("/")
    shard = [blob.url.rpartition("/")[2] for blob in index.shards].index(tar)
    return int(index.first[shard]) + index.column(shard, ["key"])["key"].to_pylist().index(key)


def ends(data: Data) -> Section | None:
    """Return a section with a histogram of each numeric column, and the images with its lowest and highest values."""
    pictures: list[Picture | None] = []
    for name in data.table.column_names:
        kind = data.table[name].type
        if name.startswith("cluster") or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            continue
        values = data.column(name)
        known = np.flatnonzero(np.isfinite(values))
        if not len(known):
            continue
        order = known[np.argsort(values[known], kind="stable")]
        pictures.append(Picture(histogram_uri(values[known]), f"Distribution of {name}", f"{name}: how often"))
        for end, rows in (("lowest", order[:ENDS]), ("highest", order[-ENDS:])):
            said = f"{name}: {end}, {values[rows[0]]:.4g} to {values[rows[-1]]:.4g}"
            pictures.append(data.sheet(data.samples[rows], f"Images with the {end} {name}", said))
    if not pictures:
        return None
    text = "What is at the ends of a column shows where to cut."
    return Section("Columns", [group(pictures)], [text])


def left_out(index: Index, cuts: Sequence[Cut]) -> Section:
    """Return a section on what each of the `cuts` leaves out. An image counts for the first cut that leaves it out."""
    rows = [[c.name, c.where, int(c.out.sum()), 100 * float(c.out.mean()), "" if c.made else "not made"] for c in cuts]
    pictures = []
    for cut in cuts:
        if images := [image for _, image in images_of(index, some_of(cut.out))]:
            said = f"{cut.name}: not {cut.where}"
            pictures.append(Picture(images_uri(images, ACROSS), f"Images that are {cut.name}", said))
    table = Table("What each cut leaves out", ["Cut", "Keeps", "Images", "%", ""], rows)
    return Section("Left out", [table, Pictures(pictures)], ["An image counts for the first cut that leaves it out."])
