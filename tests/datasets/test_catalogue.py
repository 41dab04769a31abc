"""Sets by name: from a source laid out as it is downloaded to shards with its images, labels and splits."""

import importlib
import inspect
import pkgutil
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import drloc_sets, suite_sets
from helpers.sources import check_shards, check_split, drop_reasons, read_source, source_error
from scipy.io import savemat

from eagleray.cli.catalogue import catalogue
from eagleray.datasets import sets, sources
from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.sets import OTHERS, SHIPPED
from eagleray.datasets.sources.imagenet import CLASSES
from eagleray.datasets.sources.source import SourceFiles

SETS = drloc_sets.SETS | suite_sets.SETS
PNG = ("cifar-10", "svhn", "mnist", "fer2013", "stl10", "pcam", "ucf101")
FORMS = dict.fromkeys(PNG, "PNG") | {"pets": "JPEG", "voc2007": "JPEG", "gtsrb": "PPM"}
CASES = [(name, split) for name in SETS for split in DATASETS[name].splits]


@pytest.mark.parametrize(("name", "split"), CASES)
def test_every_split_has_its_images_and_labels(name: str, split: str, tmp_path: Path):
    check_split(SETS[name], name, split, tmp_path)


@pytest.mark.parametrize("name", FORMS)
def test_shards_hold_what_the_source_holds(name: str, tmp_path: Path):
    check_shards(SETS[name], name, FORMS[name], tmp_path)


def test_classes_have_their_names(tmp_path: Path):
    def names(name: str) -> list[str]:
        SETS[name](tmp_path / name, next(iter(DATASETS[name].splits)))
        return list(read_source(name, tmp_path / name)[0].classes)

    assert names("cifar-10") == [f"class{i}" for i in range(10)]
    assert names("cifar-100") == [f"class{i}" for i in range(100)]
    assert names("svhn") == list("0123456789")
    assert names("pets") == ["Abyssinian", *[""] * 35, "yorkshire_terrier"]  # the list has no image of the others
    assert names("sketch") == ["aircraft_carrier", "The_Eiffel_Tower"]
    for subset, classes in CLASSES.items():
        assert names(subset) == sorted(classes)


def test_pickles_are_refused(tmp_path: Path):
    for name, file in {"cifar-10": "cifar-10-batches-py/data_batch_1", "cifar-100": "cifar-100-python/train"}.items():
        place = tmp_path / name / file
        place.parent.mkdir(parents=True)
        place.write_bytes(b"\x80\x02}")
        line = source_error(name, tmp_path / name)
        assert "which is not read because its pickles could run any code; expected" in line
        assert f"the other files of {name}-binary.tar.gz, unpacked" in line


def test_an_archive_must_be_unpacked(tmp_path: Path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    line = source_error("cifar-10", tmp_path)
    assert "expected data_batch_1.bin in it, unpacked from cifar-10-binary.tar.gz; " in line
    assert line.endswith("; cifar-10-binary.tar.gz must be unpacked first")
    assert "train_32x32.mat in it" in source_error("svhn", tmp_path)


def damaged(folder: Path, name: str, edit: Callable[[Path], None]) -> str:
    SETS[name](folder, next(iter(DATASETS[name].splits)))
    edit(folder)
    return source_error(name, folder)


def write(path: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: [(folder / path).write_bytes(content), None][1]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize(("name", "file"), [("flowers-102", "imagelabels.mat"), ("svhn", "train_32x32.mat")])
def test_a_download_that_was_cut_off_is_one_line(name: str, file: str, share: float, tmp_path: Path):
    def cut_short(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(share * len(data))])

    assert f"{file}: expected a MATLAB file with" in damaged(tmp_path / "in", name, cut_short)


def test_other_layouts_are_one_line(tmp_path: Path):
    part = b"\0" * 3000
    line = damaged(tmp_path / "a", "cifar-10", write("cifar-10-batches-bin/data_batch_2.bin", part))
    assert "data_batch_2.bin: not in CIFAR's binary format; expected records of 3073 bytes with labels below 10" in line
    line = damaged(tmp_path / "b", "cifar-10", write("cifar-10-batches-bin/data_batch_2.bin", b"\x0a" * 3073))
    assert "labels below 10" in line
    line = damaged(tmp_path / "c", "svhn", write("train_32x32.mat", b"no matrix" * 50))
    assert "train_32x32.mat: expected a MATLAB file with y" in line
    line = damaged(tmp_path / "d", "flowers-102", write("setid.mat", b"no matrix" * 50))
    assert "setid.mat: expected a MATLAB file with trnid, valid" in line
    line = damaged(tmp_path / "e", "pets", write("annotations/trainval.txt", b"Abyssinian_1 one\n"))
    assert (
        "trainval.txt: line 1: expected a name, its class from 1 to 37, species and breed, found 'Abyssinian_1 one'"
        in line
    )
    line = damaged(tmp_path / "f", "real", write("real_train.txt", b"real/x.jpg\n"))
    assert "real_train.txt: line 1: expected a path and a class number" in line
    lost = CLASSES["imagenet-100"][5]
    line = damaged(tmp_path / "g", "imagenet-100", lambda f: (f / f"train/{lost}").rename(f / f"../{lost}"))
    assert f"1 of imagenet-100's classes are missing: {lost}" in line
    labels = {"trnid": [1], "valid": [12], "tstid": [2]}
    mat = {k: np.array([v]) for k, v in labels.items()}
    line = damaged(tmp_path / "h", "flowers-102", lambda f: savemat(f / "setid.mat", mat))
    assert "setid.mat: image 12 is not among the 9 images of imagelabels.mat" in line


@pytest.mark.parametrize("name", ["flowers-102", "pets", "clipart"])
def test_images_that_are_listed_and_missing_are_reported(name: str, tmp_path: Path):
    expected = SETS[name](tmp_path, "test")
    key = next(iter(expected))
    next(p for p in tmp_path.rglob("*.jpg") if str(p.with_suffix("")).endswith(key)).unlink()
    assert drop_reasons(name, tmp_path, split="test") == {key: "listed, but not among the files"}


def test_a_split_that_a_set_does_not_have_is_refused(tmp_path: Path):
    assert source_error("cifar-10", tmp_path, split="val") == "--split val: expected train, test"
    assert source_error("pets", tmp_path, split="train") == "--split train: expected trainval, test"


def test_every_reader_is_in_the_table_and_every_name_is_there_once():
    """A reader is a function of a file of sources/ that is given the options and returns files."""
    modules = [importlib.import_module(f"{sources.__name__}.{m.name}") for m in pkgutil.iter_modules(sources.__path__)]
    functions = [f for m in modules for n, f in vars(m).items() if inspect.isfunction(f) and n[0] != "_"]
    readers = {f for f in functions if inspect.get_annotations(f).get("return") is SourceFiles and is_reader(f)}
    assert readers == {source.find for source in SHIPPED.values()}
    names = re.findall(r'^    "([\w-]+)": ', Path(sets.__file__).read_text(), re.MULTILINE)
    assert sorted(names) == sorted([*SHIPPED, *OTHERS])
    assert len({d.short for d in DATASETS.values()}) == len(DATASETS)


def is_reader(function: Callable[..., Any]) -> bool:
    return list(inspect.signature(function).parameters) == ["options"]


def test_the_table_in_the_docs_is_that_of_the_catalogue():
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "finetune.md").read_text()
    assert runpy.run_path(str(docs / "datasets.py"))["page"](text) == text, "run `python docs/datasets.py`"


def test_sets_are_listed():
    lines = catalogue("datasets")
    assert lines.keys() == DATASETS.keys()
    assert lines["svhn"] == (
        "SVHN has 10 classes, 73,257 images in train and 26,032 in test. "
        "Download train_32x32.mat and test_32x32.mat from ufldl.stanford.edu/housenumbers."
    )


def test_sizes_are_those_of_drlocs_table_1():
    table = {
        "imagenet-100": (126_689, 5_000, 100),
        "cifar-10": (50_000, 10_000, 10),
        "cifar-100": (50_000, 10_000, 100),
        "flowers-102": (2_040, 6_149, 102),
        "svhn": (73_257, 26_032, 10),
        "clipart": (33_525, 14_604, 345),
        "infograph": (36_023, 15_582, 345),
        "painting": (50_416, 21_850, 345),
        "quickdraw": (120_750, 51_750, 345),
        "real": (120_906, 52_041, 345),
        "sketch": (48_212, 20_916, 345),
    }
    for name, sizes in table.items():
        assert (*list(DATASETS[name].splits.values())[:2], DATASETS[name].classes) == sizes, name
    f = DATASETS["flowers-102"].splits
    assert f["train"] + f["val"] == f["trainval"]
