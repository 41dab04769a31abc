"""Read data sets whose splits are lists of image paths with class names: Food-101, DTD, SUN397 and FGVC-Aircraft."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Listing, class_labels, is_image
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import RESEARCH, Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

Row = tuple[str, str]  # path of an image below the folder of images, and its class
Splits = Mapping[str, Sequence[str]]  # the lists that make a split; the first split is the default


def food_101(options: PrepareOptions) -> SourceFiles:
    """Find images/ and meta/ in the folder."""
    splits = {split: [f"meta/{split}.txt"] for split in ("train", "test")}
    return _source_files(options, splits, "images", lambda line: _folder_row(f"{line}.jpg"))


def dtd(options: PrepareOptions) -> SourceFiles:
    """Find images/ and labels/ in the folder. Of the ten published partitions into splits, the first is used."""
    train, val, test = ([f"labels/{split}1.txt"] for split in ("train", "val", "test"))
    splits = {"trainval": train + val, "test": test, "train": train, "val": val}
    return _source_files(options, splits, "images", _folder_row)


def sun397(options: PrepareOptions) -> SourceFiles:
    """Find the class folders in SUN397/, and the lists unpacked from Partitions.zip.

    Of the ten published partitions into splits, the first is used.
    """
    splits = {"train": ["Training_01.txt"], "test": ["Testing_01.txt"]}
    return _source_files(options, splits, "", lambda line: _folder_row(line.removeprefix("/")))


def aircraft(options: PrepareOptions) -> SourceFiles:
    """Find images/ and the lists of variants in the folder data/ of FGVC-Aircraft. The variants are the classes."""
    splits = {split: [f"images_variant_{split}.txt"] for split in ("trainval", "test", "train", "val")}
    return _source_files(options, splits, "images", _variant_row)


def _folder_row(path: str) -> Row:
    return path, str(PurePosixPath(path).parent)


def _variant_row(line: str) -> Row:
    name, _, variant = line.partition(" ")
    return f"{name}.jpg", variant


def _source_files(options: PrepareOptions, splits: Splits, folder: str, parse: Callable[[str], Row]) -> SourceFiles:
    """Find the images in `folder` and the lists of all splits.

    The lists of all splits are needed for any split, because the classes are numbered across all of them.
    """
    names = sorted({name for split in splits.values() for name in split})
    tree = {files.relative_path(b, options.origin): b for b in files.list_tree(options.origin)}
    missing = [name for name in names if name not in tree]
    if missing:
        raise files.missing_error(options.origin, f"{missing[0]} in it")
    prefix = f"{folder}/" if folder else ""
    images = {n.removeprefix(prefix): b for n, b in tree.items() if n.startswith(prefix) and is_image(n)}
    if not images:
        raise files.missing_error(options.origin, f"{folder or 'folders'}/ with images in it")
    split = splits[options.split or next(iter(splits))]
    tables = [tree[name] for name in names]
    return SourceFiles([*tables, *images.values()], partial(_listing, options.origin, names, split, images, parse))


def _listing(
    origin: str, names: Sequence[str], split: Sequence[str], images: Mapping[str, Blob], parse: Callable[[str], Row]
) -> Listing:
    rows = {name: _rows(f"{origin}/{name}", parse) for name in names}
    labels = class_labels(c for lines in rows.values() for _, c in lines)
    items = lists.match_items(((path, labels[c]) for name in split for path, c in rows[name]), images)
    return Listing(items, list(labels))


def _rows(url: str, parse: Callable[[str], Row]) -> Sequence[Row]:
    rows = [parse(line.strip()) for line in files.read_text(url).splitlines() if line.strip()]
    wrong = next((path for path, c in rows if c in ("", ".")), None)
    if wrong:
        raise UserError(f"{url}: expected an image and its class in every line, found {wrong[:80]!r}")
    return rows


SOURCES = {
    "food-101": Source(
        food_101,
        licence=RESEARCH,
        dataset=Dataset(
            "Food-101",
            short="food101k",
            classes=101,
            splits={"train": 75_750, "test": 25_250},
            obtain="Download food-101.tar.gz from data.vision.ee.ethz.ch/cvl/datasets_extra/food-101",
            contents="`images/`, `meta/`",
        ),
    ),
    "sun397": Source(
        sun397,
        licence=RESEARCH,
        dataset=Dataset(
            "SUN397",
            short="sun397",
            classes=397,
            splits={"train": 19_850, "test": 19_850},
            obtain="Download SUN397.tar.gz and Partitions.zip from vision.princeton.edu/projects/2010/SUN",
            contents="`a/` ... `z/`, `Training_01.txt`, `Testing_01.txt`",
        ),
    ),
    "aircraft": Source(
        aircraft,
        licence="non-commercial research only",
        dataset=Dataset(
            "FGVC-Aircraft (variants)",
            short="aircraft",
            classes=100,
            splits={"trainval": 6_667, "test": 3_333, "train": 3_334, "val": 3_333},
            obtain="Download fgvc-aircraft-2013b.tar.gz from robots.ox.ac.uk/~vgg/data/fgvc-aircraft; use its data/",
            contents="`images/`, `images_variant_*.txt`",
        ),
    ),
    "dtd": Source(
        dtd,
        licence=RESEARCH,
        dataset=Dataset(
            "Describable Textures (partition 1)",
            short="dtd",
            classes=47,
            splits={"trainval": 3_760, "test": 1_880, "train": 1_880, "val": 1_880},
            obtain="Download dtd-r1.0.1.tar.gz from robots.ox.ac.uk/~vgg/data/dtd",
            contents="`images/`, `labels/`",
        ),
    ),
}
