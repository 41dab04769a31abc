"""Tables of strangers that list the images of a set, as text, CSV, JSON or MATLAB, end in items or a line."""

import gzip
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from helpers import drloc_sets, suite_sets
from helpers.fuzzing import counts, examples, generators, one_line
from helpers.layouts import fill
from helpers.mutations import TOKENS, change_bytes
from helpers.pictures import jpeg, write_tar
from helpers.sources import find_source, source_error
from scipy.io import loadmat, savemat

from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.sources import imagenet, matlab
from eagleray.datasets.sources.image_lists import SIGNS_TEST
from eagleray.datasets.sources.item import table
from eagleray.datasets.sources.source import fetch

SETS = drloc_sets.SETS | suite_sets.SETS
BIG = "9" * 5000
Change = Callable[[Path], object]


def text(path: str, old: str, new: str) -> Change:
    return lambda folder: (folder / path).write_text((folder / path).read_text().replace(old, new))


def mat(path: str, **values: Any) -> Change:
    """Replace variables of a MATLAB file."""

    def change(folder: Path) -> None:
        there = {name: value for name, value in loadmat(folder / path).items() if name[0] != "_"}
        savemat(folder / path, there | values, do_compression=True)

    return change


def car(**fields: Any) -> Change:
    row = {"class": 3, "fname": "00001.jpg"} | fields
    rows = np.array([tuple(row.values())], dtype=[(name, object) for name in row])
    return lambda folder: savemat(folder / "devkit" / "cars_train_annos.mat", {"annotations": rows})


LABELS, IDS, DIGITS = "imagelabels.mat", "setid.mat", "train_32x32.mat"
WHOLE = "expected whole numbers of "
CASES: dict[str, tuple[str, Change, str]] = {
    "a class that is no ASCII digit": ("gtsrb", text(SIGNS_TEST, ";42\n", ";\u00b2\n"), "expected a class of 0 to 42"),
    "a class of 5000 digits": ("gtsrb", text(SIGNS_TEST, ";42\n", f";{BIG}\n"), "expected a class of 0 to 42"),
    "a field of 200 kB": ("gtsrb", text(SIGNS_TEST, ";42\n", ";" + "x" * 200_000), "not a CSV file: field larger than"),
    "a label of 10^10": ("clipart", text("clipart_test.txt", " 1\n", " 10000000000\n"), "class number below 345"),
    "a label of 5000 digits": ("clipart", text("clipart_test.txt", " 1\n", f" {BIG}\n"), "class number below 345"),
    "a breed of 5000 digits": ("pets", text("annotations/test.txt", " 37 ", f" {BIG} "), "its class from 1 to 37"),
    "a breed of 10^10": ("pets", text("annotations/test.txt", " 37 ", " 10000000000 "), "its class from 1 to 37"),
    "deep JSON": ("hateful-memes", text("dev_seen.jsonl", "{", '{"a":' + "[" * 90_000), "line 1: expected a JSON"),
    "a label that is no number": ("flowers-102", mat(LABELS, labels=np.full((1, 9), np.nan)), WHOLE + "1 to 102"),
    "a label without end": ("flowers-102", mat(LABELS, labels=np.full((1, 9), np.inf)), WHOLE + "1 to 102"),
    "a label below 1": ("flowers-102", mat(LABELS, labels=np.full((1, 9), -3)), WHOLE + "1 to 102"),
    "complex labels": ("flowers-102", mat(LABELS, labels=np.full((1, 9), 1j)), "found values of type complex128"),
    "labels that are a text": ("flowers-102", mat(LABELS, labels="nine"), "found values of type <U4"),
    "labels that are cells": ("flowers-102", mat(LABELS, labels=np.array([1, "a"], object)), "values of type object"),
    "labels that are a struct": ("flowers-102", mat(LABELS, labels={"a": 1}), "found values of type [("),
    "half an image": ("flowers-102", mat(IDS, tstid=np.array([[1.5]])), WHOLE + "1 to 99999 in tstid, found 1.5"),
    "digits that are fractions": ("svhn", mat("test_32x32.mat", y=np.full((7, 1), 1.5)), WHOLE + "1 to 10 in y"),
    "fewer pictures than labels": (
        "svhn",
        mat("test_32x32.mat", X=np.zeros((32, 32, 3, 2), np.uint8)),
        "expected at least 7 images, X of 32 x 32 x 3 x N bytes, found 32 x 32 x 3 x 2 of type uint8",
    ),
    "pictures of another type": ("svhn", mat("test_32x32.mat", X=np.zeros((32, 32, 3, 7))), "of type float64"),
    "pictures that are cells": ("svhn", mat("test_32x32.mat", X=np.array([1, "a"], object)), "of type object"),
}
TRAINING: dict[str, tuple[str, Change, str]] = {
    "a car's class without end": ("cars", car(**{"class": np.inf}), "expected annotations with the fields"),
    "a car's class of 10^300": ("cars", car(**{"class": 1e300}), "expected classes of 1 to 196, found 1e+300"),
    "a car's class of 0": ("cars", car(**{"class": 0}), "expected classes of 1 to 196, found 0"),
    "a car's class in cells": ("cars", car(**{"class": np.array([1, 2])}), "expected annotations with the fields"),
}


@pytest.mark.parametrize("case", [*CASES, *TRAINING])
def test_a_value_that_cannot_be_true_is_one_line(case: str, tmp_path: Path) -> None:
    name, change, reason = (CASES | TRAINING)[case]
    split = "train" if case in TRAINING else list(DATASETS[name].splits)[1]
    SETS[name](tmp_path / "in", split)
    change(tmp_path / "in")
    line = source_error(name, tmp_path / "in", split=split)
    assert reason in line
    assert str(tmp_path) in line
    assert len(line) < 600


@pytest.mark.parametrize("name", ["", "/", ".", "..", "\\ud800", "a\\u0000b"])
def test_a_name_that_is_no_file_is_a_reason(name: str, tmp_path: Path) -> None:
    SETS["hateful-memes"](tmp_path, "train")
    text("train.jsonl", "img/42953.png", name)(tmp_path)
    items = table(find_source("hateful-memes", tmp_path).listing().items)  # which a file of Parquet can hold
    assert items["reason"].to_pylist().count("listed, but not among the files") == 1


def test_a_matlab_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SETS["svhn"](tmp_path / "in", "test")
    monkeypatch.setattr(matlab, "LARGEST", 2**26)
    mat("test_32x32.mat", y=np.ones((2**27, 1), np.uint8))(tmp_path / "in")
    assert (tmp_path / "in" / "test_32x32.mat").stat().st_size < 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = source_error("svhn", tmp_path / "in", split="test")
    assert line.endswith("test_32x32.mat: expected a MATLAB file with y (more than 67108864 bytes)")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_a_development_kit_that_unpacks_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "in", ["ILSVRC2012_val_00000001.JPEG"])
    monkeypatch.setattr(imagenet, "LARGEST_KIT", 2**20)
    kit = tmp_path / "kit.tar.gz"
    kit.write_bytes(gzip.compress(bytes(2**21)))
    line = source_error("imagenet-1k", tmp_path / "in", split="val", labels=str(kit))
    assert line == f"{kit}: cannot be unpacked: it contains more than 1048576 bytes"
    kit.write_bytes(kit.read_bytes()[:-500])
    monkeypatch.setattr(imagenet, "LARGEST_KIT", 2**30)
    assert "cannot be unpacked" in source_error("imagenet-1k", tmp_path / "in", split="val", labels=str(kit))


IMAGES = {".jpg", ".jpeg", ".png", ".ppm", ".avi"}  # and videos
WITHOUT_TABLES = ("imagenet-100", "imagenet-10", "caltech-101", "pcam")
FUZZED = [name for name in SETS if name not in WITHOUT_TABLES and "painting" not in name]


@pytest.mark.parametrize("count", counts(100))
def test_changed_tables_end_in_items_or_a_line(count: int | None, tmp_path: Path) -> None:
    for name in FUZZED:
        SETS[name](tmp_path / name, next(iter(DATASETS[name].splits)))

    def check(rng: Random) -> None:
        name = rng.choice(FUZZED)
        tables = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file() and p.suffix.lower() not in IMAGES)
        path, split = rng.choice(tables), rng.choice(list(DATASETS[name].splits))
        whole = path.read_bytes()
        path.write_bytes(change_bytes(rng, whole))
        with one_line(str(tmp_path / name)):
            found = find_source(name, tmp_path / name, split=split)
            items = table(found.listing().items)
            usable = items.filter(items["reason"].is_null())
            assert not len(usable) or all(len(data) for _, data in fetch(usable, found.read))
        path.write_bytes(whole)

    examples(generators(count), check, count, many=400)


@pytest.mark.parametrize("count", counts(60))
def test_changed_labels_and_captions_in_shards(count: int | None, tmp_path: Path) -> None:
    """`.cls` and `.json` beside an image: a sample, or one with a reason."""
    meta = json.dumps({"caption": "a bird", "size": [3, 4], "licence": None}).encode()

    def check(rng: Random) -> None:
        label = change_bytes(rng, b"7") if rng.random() < 0.7 else rng.choice(TOKENS)
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        write_tar(
            tmp_path / "in" / "x.tar", [("a.jpg", jpeg(1)), ("a.cls", label), ("a.json", change_bytes(rng, meta))]
        )
        [item] = find_source("webdataset", tmp_path / "in").listing().items
        assert table([item])
        assert item.reason is not None or item.meta is None or json.loads(item.meta) is not None or item.meta == "null"
        assert -1 <= item.label < 10**18

    examples(generators(count), check, count, many=400)


def test_a_matlab_file_that_crashes_its_reader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader is not safe in memory: now and then changed bytes end its process."""
    SETS["cars"](tmp_path / "in", "train")
    assert list(find_source("cars", tmp_path / "in", split="train").listing().items)
    monkeypatch.setattr(matlab, "CHILD", "import os; os.abort()")
    line = source_error("cars", tmp_path / "in", split="train")
    assert line.endswith("(SciPy crashes on it)")
