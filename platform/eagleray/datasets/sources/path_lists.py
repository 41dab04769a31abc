"""Sets whose splits are lists of images with the names of their classes: Food-101, DTD, SUN397, FGVC-Aircraft."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from eagleray.base.errors import UserError
from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Found, Listing, is_image, numbered
from eagleray.datasets.sources.job import Job
from eagleray.storage.blob import Blob

Row = tuple[str, str]  # an image's path below the folder of images, and its class
Splits = Mapping[str, Sequence[str]]  # the lists that make a split; the first split is the default


def food_101(job: Job) -> Found:
    """The folder that has images/ and meta/."""
    splits = {split: [f"meta/{split}.txt"] for split in ("train", "test")}
    return _found(job, splits, "images", lambda line: _in_folder(f"{line}.jpg"))


def dtd(job: Job) -> Found:
    """The folder that has images/ and labels/, of whose ten partitions the first counts."""
    train, val, test = ([f"labels/{split}1.txt"] for split in ("train", "val", "test"))
    return _found(job, {"trainval": train + val, "test": test, "train": train, "val": val}, "images", _in_folder)


def sun397(job: Job) -> Found:
    """SUN397/ with Partitions.zip unpacked into it; the first of the ten partitions counts."""
    splits = {"train": ["Training_01.txt"], "test": ["Testing_01.txt"]}
    return _found(job, splits, "", lambda line: _in_folder(line.removeprefix("/")))


def aircraft(job: Job) -> Found:
    """The folder data/ of FGVC-Aircraft; the classes are its variants."""
    splits = {split: [f"images_variant_{split}.txt"] for split in ("trainval", "test", "train", "val")}
    return _found(job, splits, "images", _variant)


def _in_folder(path: str) -> Row:
    return path, str(PurePosixPath(path).parent)


def _variant(line: str) -> Row:
    name, _, variant = line.partition(" ")
    return f"{name}.jpg", variant


def _found(job: Job, splits: Splits, images: str, row: Callable[[str], Row]) -> Found:
    """All lists are wanted, whichever split is asked for, as they number the classes."""
    names = sorted({name for lists_of in splits.values() for name in lists_of})
    below = {files.relative(b, job.origin): b for b in files.below(job.origin)}
    missing = [name for name in names if name not in below]
    if missing:
        raise files.nothing(job.origin, f"{missing[0]} in it")
    prefix = f"{images}/" if images else ""
    places = {n.removeprefix(prefix): b for n, b in below.items() if n.startswith(prefix) and is_image(n)}
    if not places:
        raise files.nothing(job.origin, f"{images or 'folders'}/ with images in it")
    wanted = splits[job.split or next(iter(splits))]
    listed = [below[name] for name in names]
    return Found([*listed, *places.values()], partial(_listing, job.origin, names, wanted, places, row))


def _listing(
    origin: str, names: Sequence[str], wanted: Sequence[str], places: Mapping[str, Blob], row: Callable[[str], Row]
) -> Listing:
    rows = {name: list(_rows(f"{origin}/{name}", row)) for name in names}
    classes = numbered(c for found in rows.values() for _, c in found)
    return Listing(
        lists.items(((path, classes[c]) for name in wanted for path, c in rows[name]), places), list(classes)
    )


def _rows(url: str, row: Callable[[str], Row]) -> Sequence[Row]:
    rows = [row(line.strip()) for line in files.text(url).splitlines() if line.strip()]
    wrong = next((path for path, c in rows if c in ("", ".")), None)
    if wrong:
        raise UserError(f"{url}: expected lines with an image and its class, found {wrong[:80]!r}")
    return rows
