"""Read data sets whose images are listed with their classes in text files, CSV files or files with a JSON per line."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from eagleray.base.errors import UserError, explained
from eagleray.base.files import NO_JSON
from eagleray.datasets.multilabel import bits
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Listing, class_labels, is_image
from eagleray.datasets.sources.lists import DIGITS, Rows, find_listed, lines, match_items, names_of, read_labels
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles
from eagleray.storage.blob import Blob

DOMAIN_CLASSES, SIGNS = 345, 43
SIGNS_TEST = "GT-final_test.csv"
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
VOC_MARKS = {1: 1, -1: 0, 0: -1}  # marks of `multilabel` for PASCAL VOC's marks of present, absent, difficult classes
MEMES = {"train": "train.jsonl", "dev": "dev.jsonl or dev_seen.jsonl"}  # dev's list: its name depends on the phase
WEBVISION = {
    "train": ("info/train_filelist_google.txt", "info/train_filelist_flickr.txt"),
    "val": ("info/val_filelist.txt",),
    "test": ("info/test_filelist.txt",),
}
Row = tuple[str, str]  # path of an image in the folder of images, and name of its class


def pets(options: PrepareOptions) -> SourceFiles:
    """Find images/ and annotations/ of Oxford-IIIT Pets. The breeds are the classes; image names begin with them."""

    def read(tables: Sequence[Blob]) -> tuple[Rows, Sequence[str]]:
        line, expected = r"(?P<name>\S+) (?P<label>\d+) \d+ \d+", "a name, its class from 1 to 37, species and breed"
        rows = list(read_labels(tables[0].url, line, expected, range(1, 38)))
        breeds = {label - 1: name.rpartition("_")[0] for name, label in rows}
        return [(f"{name}.jpg", label - 1) for name, label in rows], names_of(breeds)

    tables = [f"annotations/{options.split}.txt"]
    return find_listed(options.origin, tables, "images", read, expected="images/Abyssinian_1.jpg in it")


def domainnet(options: PrepareOptions) -> SourceFiles:
    """Find a domain's folder, such as clipart/, and beside it the lists clipart_train.txt and clipart_test.txt."""

    def read(tables: Sequence[Blob]) -> tuple[Rows, Sequence[str]]:
        line, expected = r"(?P<name>\S.*) (?P<label>\d+)", f"a path and a class number below {DOMAIN_CLASSES}"
        rows = list(read_labels(tables[0].url, line, expected, range(DOMAIN_CLASSES)))
        return rows, names_of({label: PurePosixPath(name).parent.name for name, label in rows})

    tables = [f"{options.source}_{options.split}.txt"]
    return find_listed(options.origin, tables, options.source, read, by="whole path")


def voc2007(options: PrepareOptions) -> SourceFiles:
    """Find JPEGImages/ and ImageSets/Main/ in the folder VOC2007, to which the archives of both splits unpack.

    An image can have several of 20 classes. Its label is an integer with bits for them, as `multilabel` explains."""

    def read(tables: Sequence[Blob]) -> tuple[Rows, Sequence[str]]:
        marks: dict[str, list[int]] = {}
        for c, table in enumerate(tables):
            line = r"(?P<name>\S+) +(?P<label>-?[01])"
            for name, mark in read_labels(table.url, line, "an image and 1, 0 or -1", range(-1, 2)):
                marks.setdefault(f"{name}.jpg", [0] * len(VOC_CLASSES))[c] = VOC_MARKS[mark]
        return ((name, bits(row)) for name, row in sorted(marks.items())), VOC_CLASSES

    tables = [f"ImageSets/Main/{c}_{options.split}.txt" for c in VOC_CLASSES]
    return find_listed(options.origin, tables, "JPEGImages", read, expected="JPEGImages/ with images", by="name")


def gtsrb(options: PrepareOptions) -> SourceFiles:
    """Find the files of a split in the folder GTSRB.

    Training images are Training/00000/*.ppm, ... from GTSRB-Training_fixed.zip. Test images are Final_Test/Images/*.ppm
    from GTSRB_Final_Test_Images.zip. Their classes are in GT-final_test.csv from GTSRB_Final_Test_GT.zip, which may lie
    anywhere in the folder."""

    def read(tables: Sequence[Blob]) -> tuple[Rows, Sequence[str]]:
        rows = files.read_csv(tables[0].url, ";")
        if not rows or not {"Filename", "ClassId"} <= rows[0].keys():
            raise UserError(f"{tables[0].url}: expected columns Filename and ClassId, separated by semicolons")
        return [(r["Filename"], _sign(r["ClassId"], tables[0].url)) for r in rows], ()

    if options.split == "test":
        folder, expected = "Final_Test/Images", "Final_Test/Images/00000.ppm in it"
        return find_listed(options.origin, [SIGNS_TEST], folder, read, expected=expected, anywhere=True, by="name")
    root = f"{options.origin}/Training"
    images = files.by_path((b for b in files.list_tree(root) if is_image(b.url)), root)
    if not images:
        raise files.missing_error(options.origin, "Training/00000/00000_00000.ppm in it")

    def listing() -> Listing:
        rows = [(name, _sign(PurePosixPath(name).parent.name, name)) for name in images]
        return Listing(match_items(rows, images))

    return SourceFiles(list(images.values()), listing)


def _sign(text: str, file: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) >= SIGNS:
        raise UserError(f"{file}: expected a class of 0 to {SIGNS - 1}, found {text[:80]!r}")
    return int(text)


def hateful_memes(options: PrepareOptions) -> SourceFiles:
    """Find img/ and the list of a split, which has a JSON object on each line. The text of the memes is not used.

    The labels of the test images are not public, so papers report results on the split dev."""

    def rows(table: Blob) -> Rows:
        for number, line in lines(table.url):
            expected = "expected a JSON object with the keys img and label, which is 0 or 1"
            with explained(f"{table.url}: line {number}: {expected}", *NO_JSON, why=False):
                row = json.loads(line)
                yield str(row["img"]).encode(errors="replace").decode(), {0: 0, 1: 1}[row["label"]]

    def read(tables: Sequence[Blob]) -> tuple[Rows, Sequence[str]]:
        return list(rows(tables[0])), ("not hateful", "hateful")

    return find_listed(options.origin, [MEMES[options.split]], "img", read, by="whole path")


def webvision(options: PrepareOptions) -> SourceFiles:
    """Find info/ and the images of a split of WebVision 1.0. Training images are in google/ and flickr/. Other images
    may be in any folder, as its name depends on how they were resized and is not in the lists."""
    split, origin = options.split, options.origin
    blobs = files.list_tree(origin)
    paths = files.by_path(blobs, origin)
    tables, names = [blob for path, blob in paths.items() if path in WEBVISION[split]], paths.get("info/synsets.txt")
    if not tables:
        raise files.missing_error(origin, f"{WEBVISION[split][0]} in it")
    images = [blob for blob in blobs if is_image(blob.url)]

    def rows() -> Rows:
        for table in tables:
            for number, line in lines(table.url):
                name, _, label = line.rpartition(" ") if split != "test" else (line.split()[0], "", "-1")
                if split != "test" and not (name and re.fullmatch(f"[0-9]{{1,{DIGITS}}}", label)):
                    where = f"{table.url}: line {number}"
                    raise UserError(f"{where}: expected a path and a class number, found {line[:80]!r}")
                yield name, int(label)

    def listing() -> Listing:
        # The file of class names may be missing, as the lists have class numbers.
        classes = [line.split()[0] for _, line in lines(names.url)] if names else []
        if split == "train":
            return Listing(match_items(rows(), files.by_path(images, origin)), classes)
        return Listing(match_items(rows(), files.by_name(images), lambda name: PurePosixPath(name).name), classes)

    return SourceFiles([*tables, *images], listing)


def food_101(options: PrepareOptions) -> SourceFiles:
    """Find images/ and meta/ in the folder."""
    splits = {split: [f"meta/{split}.txt"] for split in ("train", "test")}
    return _paths(options, splits, "images", lambda line: _folder_row(f"{line}.jpg"))


def dtd(options: PrepareOptions) -> SourceFiles:
    """Find images/ and labels/ in the folder. The first of the ten published partitions into splits is used."""
    train, val, test = ([f"labels/{split}1.txt"] for split in ("train", "val", "test"))
    splits = {"trainval": train + val, "test": test, "train": train, "val": val}
    return _paths(options, splits, "images", _folder_row)


def sun397(options: PrepareOptions) -> SourceFiles:
    """Find the class folders in SUN397/, and the lists unpacked from Partitions.zip.

    The first of the ten published partitions into splits is used."""
    splits = {"train": ["Training_01.txt"], "test": ["Testing_01.txt"]}
    return _paths(options, splits, "", lambda line: _folder_row(line.removeprefix("/")))


def aircraft(options: PrepareOptions) -> SourceFiles:
    """Find images/ and the lists of variants in the folder data/ of FGVC-Aircraft. The variants are the classes."""
    splits = {split: [f"images_variant_{split}.txt"] for split in ("trainval", "test", "train", "val")}
    return _paths(options, splits, "images", _variant_row)


def _folder_row(path: str) -> Row:
    return path, str(PurePosixPath(path).parent)


def _variant_row(line: str) -> Row:
    name, _, variant = line.partition(" ")
    return f"{name}.jpg", variant


def _paths(
    options: PrepareOptions, splits: Mapping[str, Sequence[str]], folder: str, parse: Callable[[str], Row]
) -> SourceFiles:
    """Find the images in `folder`, and the lists of all splits: a class gets the same label in every split."""
    names = sorted({name for of_split in splits.values() for name in of_split})

    def read(tables: Sequence[Blob]) -> tuple[Rows, Sequence[str]]:
        rows = {name: _parsed(table.url, parse) for name, table in zip(names, tables, strict=True)}
        labels = class_labels(c for of_list in rows.values() for _, c in of_list)
        return ((path, labels[c]) for name in splits[options.split] for path, c in rows[name]), list(labels)

    return find_listed(options.origin, names, folder, read, expected=f"{folder or 'folders'}/ with images in it")


def _parsed(url: str, parse: Callable[[str], Row]) -> list[Row]:
    rows = [parse(line) for _, line in lines(url)]
    if wrong := next((path for path, c in rows if c in ("", ".")), None):
        raise UserError(f"{url}: expected an image and its class in every line, found {wrong[:80]!r}")
    return rows
