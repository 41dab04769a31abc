"""ImageNet-1k and ImageNet-22k as a tar of class tars, as class tars or as folders, and the validation labels."""

import io
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath

from eagleray.base.errors import UserError
from eagleray.data import tar_headers
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing, class_labels, is_image, key_and_extension
from eagleray.datasets.sources.matlab import load
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import SourceFiles
from eagleray.datasets.sources.tars import gunzip, members
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.range_file import Span

CLASS = re.compile(r"n\d{8}")
LARGEST_KIT = 2**28  # bytes of the development kit, of which it has three million
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
LAYOUTS = "a tar of class tars, class tars n01440764.tar ..., or class folders n01440764/ ..."


def imagenet_1k(options: PrepareOptions) -> SourceFiles:
    """Find ImageNet-1k (ILSVRC 2012): the archives as downloaded, or the folders that PyTorch or Kaggle use."""
    origin, blobs = _find_split(options.origin, options.split)
    extra = files.list_folder(options.labels) if options.labels else []
    return SourceFiles([*blobs, *extra], partial(_listing, origin, blobs, options.split, options.labels))


def imagenet_22k(options: PrepareOptions) -> SourceFiles:
    """Find ImageNet-22k: fall11_whole.tar, winter21_whole.tar, or class tars or class folders unpacked from them."""
    origin, blobs = _find_split(options.origin, "")
    return SourceFiles(blobs, partial(_listing, origin, blobs, "train", ""))


def _find_split(origin: str, split: str) -> tuple[str, list[Blob]]:
    """Return the URL of the archive or folder that holds a split, and its files."""
    if origin.endswith(".tar"):
        return origin, [files.find_file(origin)]
    blobs = files.list_folder(origin + "/")
    archive = [b for b in blobs if b.url.endswith(f"/ILSVRC2012_img_{split}.tar")]
    classes = [b for b in blobs if CLASS.fullmatch(PurePosixPath(b.url).stem) and b.url.endswith(".tar")]
    if archive or classes:
        return origin, archive or classes
    for folder in ([f"{origin}/{split}"] if split else []) + [origin]:
        images = [b for b in files.list_tree(folder) if is_image(b.url)]
        if split and any(files.relative_path(b, folder).startswith(("train/", "val/", "test/")) for b in images):
            raise files.missing_error(origin, f"{split}/ beside the other splits")
        if images:
            return folder, images
    raise files.missing_error(origin, LAYOUTS)


def _listing(origin: str, blobs: list[Blob], split: str, labels: str) -> Listing:
    spans = [Span(files.relative_path(b, origin), b.url, 0, b.size) for b in blobs]
    if len(spans) == 1 and spans[0].url.endswith(".tar") and not CLASS.fullmatch(PurePosixPath(spans[0].name).stem):
        spans = list(members(spans[0]))
    tars = sorted(s for s in spans if s.name.endswith(".tar"))
    if tars:
        numbers = class_labels(PurePosixPath(t.name).stem for t in tars)
        return Listing(_in_tars(tars, numbers), list(numbers))
    images = sorted(s for s in spans if is_image(s.name))
    if images and all(CLASS.fullmatch(PurePosixPath(s.name).parent.name) for s in images):
        numbers = class_labels(PurePosixPath(s.name).parent.name for s in images)
        return Listing(_in_folders(images, numbers), list(numbers))
    if split == "train" or not images:
        raise files.missing_error(origin, LAYOUTS)
    if split == "test":
        return Listing(_flat(images, {}))
    if not labels:
        raise UserError(
            f"{origin}: the validation images are not in class folders; give --labels ILSVRC2012_devkit_t12.tar.gz, "
            "the folder unpacked from it, or LOC_val_solution.csv"
        )
    truth, classes = ground_truth(labels)
    return Listing(_flat(images, truth), classes)


def _in_tars(tars: Iterable[Span], numbers: Mapping[str, int]) -> Iterator[Item]:
    for tar, images in ordered_map(lambda tar: (tar, [m for m in members(tar) if is_image(m.name)]), tars):
        wnid = PurePosixPath(tar.name).stem
        for image in images:
            key, extension = key_and_extension(f"{wnid}/{PurePosixPath(image.name).name}")
            yield Item(key, image.url, image.offset, image.size, extension, numbers[wnid])


def _in_folders(images: Iterable[Span], numbers: Mapping[str, int]) -> Iterator[Item]:
    for image in images:
        path = PurePosixPath(image.name)
        key, extension = key_and_extension(f"{path.parent.name}/{path.name}")
        yield Item(key, image.url, image.offset, image.size, extension, numbers[path.parent.name])


def _flat(images: Iterable[Span], truth: Mapping[str, int]) -> Iterator[Item]:
    for image in images:
        key, extension = key_and_extension(PurePosixPath(image.name).name)
        reason = f"no label for {key}" if truth and key not in truth else None
        label = truth.get(key, -1)
        yield Item(key, image.url, image.offset, image.size, extension, label, reason=reason)


def ground_truth(url: str) -> tuple[dict[str, int], list[str]]:
    """Return the label of every validation image by its name, and the names of the classes.

    The classes are numbered as in the training split.
    """
    wnids = _kaggle(url) if url.lower().endswith(".csv") else _devkit(url)
    numbers = class_labels(wnids.values())
    return {image: numbers[wnid] for image, wnid in wnids.items()}, list(numbers)


def _kaggle(url: str) -> dict[str, str]:
    """Read the class of every image from LOC_val_solution.csv, where it is the first word of the image's boxes."""
    rows = files.read_csv(url)
    if not rows or not {"ImageId", "PredictionString"} <= rows[0].keys():
        raise UserError(f"{url}: expected Kaggle's LOC_val_solution.csv with columns ImageId and PredictionString")
    if cut := next((row["ImageId"] for row in rows if not row["PredictionString"].strip()), None):
        raise UserError(f"{url}: image {cut} has no class; the file may be cut off")
    return {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}


def _devkit(url: str) -> dict[str, str]:
    """Read the class of every image from the development kit.

    The kit numbers the classes in its own way, and meta.mat translates these numbers. The classes are those synsets
    that have no children.
    """
    parts, message = _devkit_files(url), f"{url}: not the development kit of ILSVRC 2012"
    try:
        synsets = load(parts["meta.mat"], message, variable_names=["synsets"], squeeze_me=True)["synsets"]
        wnids = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets if int(s["num_children"]) == 0}
        truth = [wnids[int(line)] for line in parts[TRUTH].split()]
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as e:
        raise UserError(f"{message} ({type(e).__name__}: {e})") from None
    classes = set(wnids.values())
    if missing := classes - set(truth):
        raise UserError(f"{url}: {len(missing)} of {len(classes)} classes have no validation image")
    return {f"ILSVRC2012_val_{i:08d}": wnid for i, wnid in enumerate(truth, 1)}


def _devkit_files(url: str) -> dict[str, bytes]:
    names = ("meta.mat", TRUTH)
    if url.lower().endswith((".tar.gz", ".tgz")):
        files.find_file(url)
        try:
            kit = gunzip(url, LARGEST_KIT)
            spans = {PurePosixPath(m[0]).name: m for m in tar_headers.members(io.BytesIO(kit), len(kit))}
        except tar_headers.DamagedTar as e:
            raise UserError(f"{url}: cannot be unpacked: {e}") from None
        return {n: kit[spans[n].offset : spans[n].offset + spans[n].size] for n in names if n in spans}
    blobs = {PurePosixPath(b.url).name: b.url for b in files.list_tree(url)}
    if names[0] not in blobs:
        raise files.missing_error(
            url, "the development kit of ILSVRC 2012, which has data/meta.mat, or LOC_val_solution.csv"
        )
    return {n: bytes(store.store(url).get(blobs[n])) for n in names if n in blobs}
