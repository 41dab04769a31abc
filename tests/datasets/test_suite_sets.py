"""The sets of EsViT's suite, laid out as they are downloaded: what is found is what was put there."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.layouts import fill
from helpers.pictures import encode, picture
from helpers.sources import Images, Layout, check_shards, check_split, drop_reasons, read_source, source_error
from scipy.io import savemat

from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.multilabel import CLASSES, bits, marks
from eagleray.datasets.sources import voc2007
from eagleray.datasets.sources.gtsrb import TRUTH

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
        for c, of in enumerate(voc2007.CLASSES):
            lines = [f"{n} {1 if int(n) == c else 0 if int(n) == c - 1 else -1:2d}\n" for n in names]
            (folder / "ImageSets" / "Main" / f"{of}_{part}.txt").write_text("".join(lines))
        if part == split:
            expected = {n: (data[f"{n}.jpg"], (1 << int(n)) + (1 << (21 + int(n)))) for n in names}
    return expected


def caltech_101(folder: Path, split: str) -> Images:
    """Which images are drawn, the tests below say."""
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
    (folder / TRUTH).write_text("Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n" + "".join(lines))
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
    "hateful-memes": hateful_memes,
}
CASES = [(name, split) for name in SETS for split in DATASETS[name].splits]


@pytest.mark.parametrize(("name", "split"), CASES)
def test_a_source_is_found_as_it_was_made(name: str, split: str, tmp_path: Path):
    check_split(SETS[name], name, split, tmp_path)


FORMS = {"voc2007": "JPEG", "mnist": "PNG", "fer2013": "PNG", "stl10": "PNG", "gtsrb": "PPM"}


@pytest.mark.parametrize("name", FORMS)
def test_shards_hold_what_the_source_holds(name: str, tmp_path: Path):
    check_shards(SETS[name], name, FORMS[name], tmp_path)


def test_several_classes_in_one_label():
    given = np.random.default_rng(0).integers(-1, 2, (50, CLASSES))
    given[0], given[1] = 1, -1
    labels = [bits(row) for row in given.tolist()]
    assert (marks(np.array(labels)) == given).all()
    assert len(set(labels)) == 50
    assert max(len(str(label)) for label in labels) <= 18, "longer ones are no labels"


def test_caltechs_splits_are_drawn_30_of_a_class_and_always_the_same(tmp_path: Path):
    train, test = (caltech_101(tmp_path / name, name) for name in ("train", "test"))
    assert len(train) == 60
    assert len(test) == 6
    assert not train.keys() & test.keys()
    assert train.keys() == read_source("caltech-101", tmp_path / "test", split="train")[1].keys()


def test_an_image_that_is_listed_and_missing_is_reported(tmp_path: Path):
    for name, path, key in (
        ("food-101", "images/waffles/11.jpg", "waffles/11"),
        ("voc2007", "JPEGImages/000005.jpg", "000005"),
        ("cars", "cars_train/00002.jpg", "00002"),
    ):
        SETS[name](tmp_path / name, "train")
        (tmp_path / name / path).unlink()
        assert drop_reasons(name, tmp_path / name, split="train") == {key: "listed, but not among the files"}


def test_other_layouts_are_one_line(tmp_path: Path):
    def damaged(name: str, file: str, content: bytes) -> str:
        SETS[name](tmp_path / name, "test" if "test" in DATASETS[name].splits else "train")
        (tmp_path / name / file).write_bytes(content)
        return source_error(name, tmp_path / name)

    assert "train.txt: expected an image and its class in every line, found 'x.jpg'" in damaged(
        "food-101", "meta/train.txt", b"x\n"
    )
    assert "found '10.jpg'" in damaged("aircraft", "images_variant_val.txt", b"10\n")
    line = damaged("voc2007", "ImageSets/Main/cow_trainval.txt", b"000005 2\n")
    assert "cow_trainval.txt: line 1: expected an image and 1, 0 or -1, found '000005 2'" in line
    line = damaged("mnist", "train-labels-idx1-ubyte", b"\0" * 13)
    assert "train-images-idx3-ubyte: expected 5 images of 28 x 28 bytes, one for each label in" in line
    line = damaged("stl10", "stl10_binary/train_y.bin", b"\0\1\2")
    assert "train_X.bin: expected 3 images of 27648 bytes, and labels from 1 to 10" in line
    line = damaged("fer2013", "fer2013.csv", b"emotion,pixels,Usage\n0,1 2 3,Training\n")
    assert "fer2013.csv: line 2: expected emotion,pixels,Usage: a class from 0 to 6, 2304 grey values" in line
    assert "train.jsonl: line 1: expected a JSON object with the keys img and label" in damaged(
        "hateful-memes", "train.jsonl", b'{"a":1}'
    )
    assert "expected annotations with the fields fname and class" in damaged_cars(tmp_path / "cars")
    SETS["gtsrb"](tmp_path / "signs", "test")
    (tmp_path / "signs" / "Training" / "00042").rename(tmp_path / "signs" / "Training" / "stop")
    assert "expected a class of 0 to 42, found 'stop'" in source_error("gtsrb", tmp_path / "signs")
    lines = (tmp_path / "signs" / TRUTH).read_text().splitlines()
    (tmp_path / "signs" / TRUTH).write_text("\n".join([lines[0], "00000.ppm;53"]))
    assert "expected a class of 0 to 42, found None" in source_error("gtsrb", tmp_path / "signs", split="test")


def damaged_cars(folder: Path) -> str:
    cars(folder, "train")
    savemat(folder / "devkit" / "cars_train_annos.mat", {"annotations": np.arange(3)})
    return source_error("cars", folder)


def test_an_archive_must_be_unpacked(tmp_path: Path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    line = source_error("mnist", tmp_path)
    assert line.endswith("expected train-images-idx3-ubyte in it; train-images-idx3-ubyte.gz must be unpacked first")
