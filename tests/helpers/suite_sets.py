"""Lay out the sets of EsViT's suite as they are downloaded, with a few images each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from helpers.layouts import fill
from helpers.pictures import encode, picture
from helpers.sources import Images, Layout, read_source
from scipy.io import savemat

from eagleray.datasets.sources.image_lists import SIGNS_TEST, VOC_CLASSES
from eagleray.datasets.sources.pcam import STEM

Rows = dict[str, tuple[str, int]]  # an image's path and its class, by what a list calls it


def in_lists(folder: Path, rows: dict[str, Rows], images: str, file: Callable[[str], list[Path]], split: str) -> Images:
    """Images, and the lists of each part of a set; those of a split."""
    paths = [path for part in rows.values() for path, _ in part.values()]
    data = fill(folder / images, paths)
    for part, of in rows.items():
        for place in file(part):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            with (folder / place).open("a") as f:
                f.writelines(f"{line}\n" for line in of)
    parts = ("train", "val") if split == "trainval" else (split,)
    wanted = [row for part in parts for row in rows[part].values()]
    return {path.rpartition(".")[0].replace(".", "_"): (data[path], label) for path, label in wanted}


def food_101(folder: Path, split: str) -> Images:
    rows = {
        "train": {"waffles/11": ("waffles/11.jpg", 1), "apple_pie/7": ("apple_pie/7.jpg", 0)},
        "test": {"waffles/12": ("waffles/12.jpg", 1)},
    }
    return in_lists(folder, rows, "images", lambda part: [Path(f"meta/{part}.txt")], split)


def dtd(folder: Path, split: str) -> Images:
    names = {
        "train": ["banded/b_1.jpg", "zigzagged/z_1.jpg"],
        "val": ["banded/b_2.jpg"],
        "test": ["woven/w_1.jpg"],
    }
    labels = {"b": 0, "w": 1, "z": 2}
    rows = {part: {n: (n, labels[n[0]]) for n in of} for part, of in names.items()}
    return in_lists(folder, rows, "images", lambda part: [Path(f"labels/{part}1.txt")], split)


def sun397(folder: Path, split: str) -> Images:
    rows = {
        "train": {"/a/abbey/sun_b.jpg": ("a/abbey/sun_b.jpg", 0), "/a/apse/indoor/s.jpg": ("a/apse/indoor/s.jpg", 1)},
        "test": {"/y/yard/sun_c.jpg": ("y/yard/sun_c.jpg", 2)},
    }
    names = {"train": "Training_01.txt", "test": "Testing_01.txt"}
    return in_lists(folder, rows, "", lambda part: [Path(names[part])], split)


def aircraft(folder: Path, split: str) -> Images:
    rows = {
        "train": {"10 F/A-18": ("10.jpg", 2), "11 707-320": ("11.jpg", 0)},
        "val": {"12 A340 500": ("12.jpg", 1)},
        "test": {"13 F/A-18": ("13.jpg", 2)},
    }

    def file(part: str) -> list[Path]:
        whole = [] if part == "test" else ["trainval"]
        return [Path(f"images_variant_{name}.txt") for name in (part, *whole)]

    return in_lists(folder, rows, "images", file, split)


def cars(folder: Path, split: str) -> Images:
    labels = {"train": [196, 3, 1], "test": [2, 50]}
    (folder / "devkit").mkdir(parents=True)
    names = {"train": "devkit/cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}
    expected: Images = {}
    for part, of in labels.items():
        data = fill(folder / f"cars_{part}", [f"{i:05d}.jpg" for i in range(1, len(of) + 1)])
        kind = [("bbox_x1", object), ("class", object), ("fname", object)]
        rows = np.array([(1, y, name) for y, name in zip(of, data, strict=True)], dtype=kind)
        savemat(folder / names[part], {"annotations": rows})
        if part == split:
            expected = {n.removesuffix(".jpg"): (data[n], y - 1) for n, y in zip(data, of, strict=True)}
    return expected


def voc(folder: Path, split: str) -> Images:
    """Each image has one class, one that is hard to tell, and none of the others."""
    parts = {"train": ["000005", "000007"], "val": ["000009"], "test": ["000001", "000002"]}
    data = fill(folder / "JPEGImages", [f"{name}.jpg" for names in parts.values() for name in names])
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    expected: Images = {}
    for part, names in {**parts, "trainval": parts["train"] + parts["val"]}.items():
        for c, of in enumerate(VOC_CLASSES):
            lines = [f"{n} {1 if int(n) == c else 0 if int(n) == c - 1 else -1:2d}\n" for n in names]
            (folder / "ImageSets" / "Main" / f"{of}_{part}.txt").write_text("".join(lines))
        if part == split:
            expected = {n: (data[f"{n}.jpg"], (1 << int(n)) + (1 << (21 + int(n)))) for n in names}
    return expected


def caltech_101(folder: Path, split: str) -> Images:
    """The images that are drawn for a split, which a test of the source checks."""
    names = [f"{c}/image_{i:04d}.jpg" for c in ("accordion", "BACKGROUND_Google") for i in range(33)]
    data = fill(folder / "101_ObjectCategories", names)
    found = read_source("caltech-101", folder, split=split)[1]
    return {k: (data[f"{k}.jpg"], int(k.startswith("accordion"))) for k in found}


def mnist(folder: Path, split: str) -> Images:
    folder.mkdir()
    expected: Images = {}
    for seed, (part, stem) in enumerate((("train", "train"), ("test", "t10k"))):
        pixels = [picture(30 * seed + i, 28, 28)[..., 0] for i in range(4)]
        y = bytes([9, 0, 3, 3])
        header = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (4, 28, 28))
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(header + b"".join(p.tobytes() for p in pixels))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x04" + y)
        if part == split:
            expected = {f"{stem}/{i:05d}": (np.stack([p] * 3, -1), y[i]) for i, p in enumerate(pixels)}
    return expected


def fer2013(folder: Path, split: str) -> Images:
    folder.mkdir()
    usages = {"train": "Training", "val": "PublicTest", "test": "PrivateTest"}
    wanted = {"trainval": ("train", "val")}.get(split, (split,))
    expected: Images = {}
    lines = ["emotion,pixels,Usage\n"]
    for i, part in enumerate(["train", "train", "val", "test", "test"]):
        pixels = picture(i, 48, 48)[..., 0]
        lines.append(f'{6 - i},"{" ".join(map(str, pixels.ravel()))}",{usages[part]}\n')
        if part in wanted:
            expected[f"{usages[part]}/{i:05d}"] = (np.stack([pixels] * 3, -1), 6 - i)
    (folder / "fer2013.csv").write_text("".join(lines))
    return expected


def stl10(folder: Path, split: str) -> Images:
    place = folder / "stl10_binary"
    place.mkdir(parents=True)
    (place / "class_names.txt").write_text("".join(f"class{i}\n" for i in range(10)))
    expected: Images = {}
    for seed, part in enumerate(("train", "test")):
        images = [picture(40 * seed + i, 96, 96) for i in range(3)]
        y = bytes([10, 1, 4])
        (place / f"{part}_X.bin").write_bytes(b"".join(x.transpose(2, 1, 0).tobytes() for x in images))
        (place / f"{part}_y.bin").write_bytes(y)
        if part == split:
            expected = {f"{part}/{i:05d}": (x, y[i] - 1) for i, x in enumerate(images)}
    return expected


def gtsrb(folder: Path, split: str) -> Images:
    expected: Images = {}
    train = {f"Training/{c:05d}/00000_0000{i}.ppm": c for c in (0, 42) for i in range(2)}
    test = {f"Final_Test/Images/0000{i}.ppm": y for i, y in enumerate((42, 7))}
    for seed, (name, y) in enumerate((train | test).items()):
        data = encode(picture(seed), "PPM")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        if (name in train) == (split == "train"):
            key = name.removeprefix("Training/" if name in train else "Final_Test/Images/")
            expected[key.removesuffix(".ppm")] = (data, y)
    lines = [f"{name.rpartition('/')[2]};53;54;6;5;48;49;{y}\n" for name, y in test.items()]
    (folder / SIGNS_TEST).write_text("Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n" + "".join(lines))
    return expected


def pcam(folder: Path, split: str) -> Images:
    """Patches of which two are compressed together, in one of the files; those of the others lie in a row."""
    h5py = pytest.importorskip("h5py")
    folder.mkdir(exist_ok=True)
    expected: Images = {}
    for seed, (part, of) in enumerate(
        {"train": ("train", "trainval"), "valid": ("val", "trainval"), "test": ()}.items()
    ):
        patches, y = [picture(50 * seed + i, 96, 96) for i in range(5)], [1, 0, 0, 1, 1]
        keys: dict[str, Any] = {"chunks": (2, 96, 48, 3), "compression": "gzip"} if part == "train" else {}
        with h5py.File(folder / f"{STEM}{part}_x.h5", "w") as file:
            file.create_dataset("x", data=np.stack(patches), **keys)
        with h5py.File(folder / f"{STEM}{part}_y.h5", "w") as file:
            file.create_dataset("y", data=np.array(y, np.uint8).reshape(-1, 1, 1, 1))
        if split in (part, *of):
            expected |= {f"{part}/{i:06d}": (x, y[i]) for i, x in enumerate(patches)}
    return expected


def ucf101(folder: Path, split: str) -> Images:
    """Videos of five and of six frames, without loss; the third and the fourth frame are expected."""
    lists = {"train": ["Archery/v_Archery_g08_c01", "YoYo/v_YoYo_g09_c02"], "test": ["YoYo/v_YoYo_g01_c01"]}
    names = folder / "ucfTrainTestlist"
    names.mkdir(parents=True)
    (names / "classInd.txt").write_text("1 Archery\r\n2 YoYo\r\n")
    expected: Images = {}
    for seed, (part, videos) in enumerate(lists.items()):
        labels = [int(video.startswith("YoYo")) for video in videos]
        lines = [f"{v}.avi {y + 1}" if part == "train" else f"{v}.avi" for v, y in zip(videos, labels, strict=True)]
        (names / f"{part}list01.txt").write_text("\r\n".join(lines))
        for n, (video, label) in enumerate(zip(videos, labels, strict=True), 5):
            frames = [picture(100 * seed + 10 * n + i, 48, 64) for i in range(n)]
            path = folder / "UCF-101" / f"{video}.avi"
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"FFV1"), 25, (64, 48))
            for frame in frames:
                writer.write(np.ascontiguousarray(frame[..., ::-1]))
            writer.release()
            if part == split:
                expected[video] = (frames[n // 2], label)
    return expected


def hateful_memes(folder: Path, split: str) -> Images:
    rows = {"train": {"img/42953.png": 0, "img/23058.png": 1}, "dev": {"img/08291.png": 1}}
    data = fill(folder, [name for of in rows.values() for name in of])
    for part, of in rows.items():
        lines = [json.dumps({"id": 1, "img": name, "label": y, "text": 'it\'s "x"'}) for name, y in of.items()]
        (folder / ("train.jsonl" if part == "train" else "dev_seen.jsonl")).write_text("\n".join(lines) + "\n")
    return {name.removesuffix(".png"): (data[name], y) for name, y in rows[split].items()}


SETS: dict[str, Layout] = {
    "food-101": food_101,
    "sun397": sun397,
    "cars": cars,
    "aircraft": aircraft,
    "voc2007": voc,
    "dtd": dtd,
    "caltech-101": caltech_101,
    "mnist": mnist,
    "fer2013": fer2013,
    "stl10": stl10,
    "gtsrb": gtsrb,
    "pcam": pcam,
    "ucf101": ucf101,
    "hateful-memes": hateful_memes,
}
