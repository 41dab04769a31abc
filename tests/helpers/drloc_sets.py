"""Lay out the sets of DRLoc's tables as they are downloaded, with a few images each."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from helpers.layouts import fill
from helpers.pictures import picture
from helpers.sources import Images, Layout
from scipy.io import savemat

from eagleray.datasets.sets import SHIPPED
from eagleray.datasets.sources import image_lists
from eagleray.datasets.sources.imagenet import CLASSES


def cifar(folder: Path, split: str, *, fine: bool = False, each: int = 5) -> Images:
    """Both splits of the binary version, `each` images in a file; up to ten, their pixels are all different."""
    place = folder / ("cifar-100-binary" if fine else "cifar-10-batches-bin")
    place.mkdir(parents=True)
    classes = 100 if fine else 10
    words = "".join(f"class{i}\n" for i in range(classes)) + "\n"
    (place / ("fine_label_names.txt" if fine else "batches.meta.txt")).write_text(words)
    files = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    if fine:
        files = {"train": ["train"], "test": ["test"]}
    expected: Images = {}
    for seed, (name, of) in enumerate((n, split) for split, names in files.items() for n in names):
        images = [picture(10 * seed + i) for i in range(each)]
        labels = [(7 * seed + 3 * i + 1) % classes for i in range(each)]
        coarse = [bytes([19 - i % 20])[: int(fine)] for i in range(each)]
        records = zip(coarse, labels, images, strict=True)
        (place / f"{name}.bin").write_bytes(
            b"".join(c + bytes([y]) + x.transpose(2, 0, 1).tobytes() for c, y, x in records)
        )
        if of == split:
            expected |= {f"{name}/{i:05d}": (x, y) for i, (x, y) in enumerate(zip(images, labels, strict=True))}
    return expected


def cifar_100(folder: Path, split: str) -> Images:
    return cifar(folder, split, fine=True)


def svhn(folder: Path, split: str) -> Images:
    folder.mkdir()
    expected: Images = {}
    for seed, of in enumerate(("train", "test")):
        images = [picture(20 * seed + i) for i in range(7)]
        y = np.array([[10], [1], [9], [10], [5], [2], [3]], np.uint8)
        pixels = np.stack(images, -1)
        savemat(folder / f"{of}_32x32.mat", {"X": pixels, "y": y}, do_compression=True)
        if of == split:
            expected = {f"{of}/{i:06d}": (x, int(y[i, 0]) % 10) for i, x in enumerate(images)}
    return expected


def flowers(folder: Path, split: str) -> Images:
    data = fill(folder / "jpg", [f"image_{i:05d}.jpg" for i in range(1, 10)])
    labels = np.array([[102, 3, 1, 77, 3, 1, 50, 2, 9]], np.uint8)
    savemat(folder / "imagelabels.mat", {"labels": labels})
    ids = {"trnid": [5, 1, 2], "valid": [9, 3], "tstid": [8, 4, 6, 7]}
    savemat(folder / "setid.mat", {k: np.array([v], np.uint16) for k, v in ids.items()})
    wanted = {"trainval": [1, 2, 3, 5, 9], "test": [4, 6, 7, 8], "train": [1, 2, 5], "val": [3, 9]}[split]
    return {f"image_{i:05d}": (data[f"image_{i:05d}.jpg"], int(labels[0, i - 1]) - 1) for i in wanted}


def pets(folder: Path, split: str) -> Images:
    lists = {"trainval": ["Abyssinian_1", "yorkshire_terrier_2"], "test": ["Abyssinian_12", "yorkshire_terrier_9"]}
    data = fill(folder / "images", [f"{name}.jpg" for names in lists.values() for name in names])
    (folder / "images" / "Abyssinian_100.mat").write_bytes(b"as it is in the archive")
    (folder / "annotations").mkdir()
    for of, names in lists.items():
        lines = [f"{name} {1 + 36 * (name[0] == 'y')} {1 + (name[0] == 'y')} 1" for name in names]
        (folder / "annotations" / f"{of}.txt").write_text(
            "#Image CLASS-ID SPECIES BREED ID\n" + "\n".join(lines) + "\n"
        )
    return {name: (data[f"{name}.jpg"], 36 * (name[0] == "y")) for name in lists[split]}


def domainnet(domain: str) -> Callable[[Path, str], Images]:
    def make(folder: Path, split: str) -> Images:
        paths = [
            f"{domain}/{c}/{domain}_{i:03d}.jpg" for i, c in enumerate(("aircraft_carrier", "The_Eiffel_Tower") * 2)
        ]
        lists = {"train": {paths[0]: 0, paths[1]: 1, paths[2]: 0}, "test": {paths[3]: 1}}
        data = fill(folder, paths)
        for of, rows in lists.items():
            (folder / f"{domain}_{of}.txt").write_text("".join(f"{path} {label}\n" for path, label in rows.items()))
        return {p.removesuffix(".jpg"): (data[p], label) for p, label in lists[split].items()}

    return make


def imagenet_subset(name: str) -> Layout:
    """A class more than there are in it, which comes first."""
    classes = CLASSES[name]

    def make(folder: Path, split: str) -> Images:
        names = {of: [f"{of}/{c}/{c}_{of}.JPEG" for c in ["n01440764", *reversed(classes)]] for of in ("train", "val")}
        data = fill(folder, names["train"] + names["val"])
        return {f"{c}/{c}_{split}": (data[f"{split}/{c}/{c}_{split}.JPEG"], i) for i, c in enumerate(classes)}

    return make


SETS: dict[str, Layout] = {
    "cifar-10": cifar,
    "cifar-100": cifar_100,
    "svhn": svhn,
    "flowers-102": flowers,
    "pets": pets,
    **{name: imagenet_subset(name) for name in CLASSES},
    **{name: domainnet(name) for name, source in SHIPPED.items() if source.find is image_lists.domainnet},
}
