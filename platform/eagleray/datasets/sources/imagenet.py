"""Read ImageNet-1k (with validation labels) and ImageNet-22k in several layouts, and subsets of ImageNet-1k's classes.

The layouts are a tar with a tar for each class in it, a tar for each class, and a folder for each class. ImageNet-100
was chosen by CMC (Tian et al. 2020, arXiv:1906.05849). ImageNet-10 was chosen by DAC (Chang et al. 2017, "Deep Adaptive
Image Clustering") and is used by Contrastive Clustering (Li et al. 2020, arXiv:2009.09687) and, after it, by SelfPatch;
the repositories of both list the same ten classes."""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from eagleray.base.errors import UserError, explained
from eagleray.data import tar_headers
from eagleray.datasets.sources import files
from eagleray.datasets.sources.item import Item, Listing, class_labels, is_image, key_and_extension
from eagleray.datasets.sources.matlab import load
from eagleray.datasets.sources.source import PrepareOptions, SourceFiles
from eagleray.datasets.sources.tars import gunzip, members
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.ordered_map import ordered_map
from eagleray.storage.range_file import Span

CLASS = re.compile(r"n\d{8}")
LARGEST_KIT = 2**28  # most bytes of the unpacked development kit; the real kit has three million bytes
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
IMAGENET_100 = """
n01558993 n01692333 n01729322 n01735189 n01749939 n01773797 n01820546 n01855672 n01978455 n01980166
n01983481 n02009229 n02018207 n02085620 n02086240 n02086910 n02087046 n02089867 n02089973 n02090622
n02091831 n02093428 n02099849 n02100583 n02104029 n02105505 n02106550 n02107142 n02108089 n02109047
n02113799 n02113978 n02114855 n02116738 n02119022 n02123045 n02138441 n02172182 n02231487 n02259212
n02326432 n02396427 n02483362 n02488291 n02701002 n02788148 n02804414 n02859443 n02869837 n02877765
n02974003 n03017168 n03032252 n03062245 n03085013 n03259280 n03379051 n03424325 n03492542 n03494278
n03530642 n03584829 n03594734 n03637318 n03642806 n03764736 n03775546 n03777754 n03785016 n03787032
n03794056 n03837869 n03891251 n03903868 n03930630 n03947888 n04026417 n04067472 n04099969 n04111531
n04127249 n04136333 n04229816 n04238763 n04336792 n04418357 n04429376 n04435653 n04485082 n04493381
n04517823 n04589890 n04592741 n07714571 n07715103 n07753275 n07831146 n07836838 n13037406 n13040303
"""
IMAGENET_10 = """
n02056570 n02085936 n02128757 n02690373 n02692877 n03095699 n04254680 n04285008 n04467665 n07747607
"""
CLASSES = {"imagenet-100": IMAGENET_100.split(), "imagenet-10": IMAGENET_10.split()}
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
    """Return the label of every validation image by the image's name, and the names of the classes.

    The labels are those of the training split."""
    wnids = _kaggle(url) if url.lower().endswith(".csv") else _devkit(url)
    numbers = class_labels(wnids.values())
    return {image: numbers[wnid] for image, wnid in wnids.items()}, list(numbers)


def _kaggle(url: str) -> dict[str, str]:
    """Read every image's class from LOC_val_solution.csv, where it precedes the coordinates of the image's boxes."""
    rows = files.read_csv(url)
    if not rows or not {"ImageId", "PredictionString"} <= rows[0].keys():
        raise UserError(f"{url}: expected Kaggle's LOC_val_solution.csv with columns ImageId and PredictionString")
    if cut := next((row["ImageId"] for row in rows if not row["PredictionString"].strip()), None):
        raise UserError(f"{url}: image {cut} has no class; the file may be cut off")
    return {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}


def _devkit(url: str) -> dict[str, str]:
    """Return the WordNet id of every validation image's class, by the image's name, from the development kit.

    The kit has class numbers of its own, which meta.mat translates to WordNet ids. The classes are the synsets without
    children."""
    parts, message = _devkit_files(url), f"{url}: not the development kit of ILSVRC 2012"
    with explained(message, KeyError, ValueError, TypeError, IndexError, OverflowError):
        synsets = load(parts["meta.mat"], message, variable_names=["synsets"], squeeze_me=True)["synsets"]
        wnids = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets if int(s["num_children"]) == 0}
        truth = [wnids[int(line)] for line in parts[TRUTH].split()]
    classes = set(wnids.values())
    if missing := classes - set(truth):
        raise UserError(f"{url}: {len(missing)} of {len(classes)} classes have no validation image")
    return {f"ILSVRC2012_val_{i:08d}": wnid for i, wnid in enumerate(truth, 1)}


def _devkit_files(url: str) -> dict[str, bytes]:
    names = ("meta.mat", TRUTH)
    if url.lower().endswith((".tar.gz", ".tgz")):
        files.find_file(url)
        with explained(f"{url}: cannot be unpacked", tar_headers.DamagedTar):
            kit = gunzip(url, LARGEST_KIT)
            spans = {PurePosixPath(m[0]).name: m for m in tar_headers.members(io.BytesIO(kit), len(kit))}
        return {n: kit[spans[n].offset : spans[n].offset + spans[n].size] for n in names if n in spans}
    blobs = {PurePosixPath(b.url).name: b.url for b in files.list_tree(url)}
    if names[0] not in blobs:
        raise files.missing_error(
            url, "the development kit of ILSVRC 2012, which has data/meta.mat, or LOC_val_solution.csv"
        )
    return {n: bytes(store.store(url).get(blobs[n])) for n in names if n in blobs}


def imagenet_subset(options: PrepareOptions) -> SourceFiles:
    """Find ImageNet-1k in any of its layouts. The subset's classes are numbered in the sorted order of their names."""
    whole = imagenet_1k(options)
    return replace(whole, listing=partial(_subset_listing, options, whole))


def _subset_listing(options: PrepareOptions, source: SourceFiles) -> Listing:
    whole, classes = source.listing(), CLASSES[options.source]
    if missing := sorted(set(classes) - set(whole.classes)):
        few = f"{len(missing)} of {options.source}'s classes are missing: {', '.join(missing[:3])} ..."
        raise UserError(f"{options.origin}: {few}")
    return Listing(_of_classes(whole, classes), classes)


def _of_classes(whole: Listing, classes: Sequence[str]) -> Iterator[Item]:
    labels = class_labels(classes)
    for item in whole.items:
        if item.label >= 0 and whole.classes[item.label] in labels:
            yield item._replace(label=labels[whole.classes[item.label]])
