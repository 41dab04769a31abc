"""The sets of EsViT's suite, laid out as they are downloaded: what is found is what was put there."""

from pathlib import Path

import numpy as np
import pytest
from helpers.layouts import run_prepare
from helpers.sources import drop_reasons, read_source, source_error
from helpers.suite_sets import SETS, caltech_101, cars
from scipy.io import savemat

from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.multilabel import CLASSES, bits, marks
from eagleray.datasets.sources.image_lists import SIGNS_TEST
from eagleray.datasets.sources.pcam import STEM


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
    lines = (tmp_path / "signs" / SIGNS_TEST).read_text().splitlines()
    (tmp_path / "signs" / SIGNS_TEST).write_text("\n".join([lines[0], "00000.ppm;53"]))
    assert "expected a class of 0 to 42, found ''" in source_error("gtsrb", tmp_path / "signs", split="test")


def test_other_layouts_of_ucf101_are_one_line(tmp_path: Path):
    SETS["ucf101"](tmp_path, "train")
    (tmp_path / "UCF-101/YoYo/v_YoYo_g09_c02.avi").write_bytes(b"no video")
    card = run_prepare("ucf101", tmp_path, tmp_path / "out")
    assert (card["images"], card["listed"]) == (1, 2)
    assert card["dropped"] == {"the image has no bytes": {"count": 1, "examples": ["YoYo/v_YoYo_g09_c02"]}}
    (tmp_path / "ucfTrainTestlist/trainlist01.txt").write_text("Diving/v_Diving_g08_c01.avi 26\n")
    line = source_error("ucf101", tmp_path)
    assert "trainlist01.txt: line 1: expected a video in the folder of a class of classInd.txt, found 'Diving/" in line
    (tmp_path / "ucfTrainTestlist/classInd.txt").write_text("0 Archery\n")
    assert "classInd.txt: line 1: expected a number of 1 to 101 and a class, found '0 Archery'" in source_error(
        "ucf101", tmp_path
    )


def test_other_layouts_of_patch_camelyon_are_one_line(tmp_path: Path):
    SETS["pcam"](tmp_path, "test")
    labels = tmp_path / f"{STEM}test_y.h5"
    labels.write_bytes((tmp_path / f"{STEM}test_x.h5").read_bytes())
    assert f"{labels}: expected an HDF5 file with y: " in source_error("pcam", tmp_path, split="test")
    labels.write_bytes(b"no labels")
    assert f"{labels}: expected an HDF5 file with y: " in source_error("pcam", tmp_path, split="test")
    labels.unlink()
    assert f"expected {STEM}test_y.h5 in it, unpacked from {STEM}test_y.h5.gz" in source_error(
        "pcam", tmp_path, split="test"
    )


def test_patches_that_are_compressed_together_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also for a shard, whose items are shuffled: unpacking 1,024 patches for each would take days."""
    h5py = pytest.importorskip("h5py")
    SETS["pcam"](tmp_path, "train")
    read, reads = h5py.Dataset.__getitem__, []
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda self, at: reads.append(at) or read(self, at))
    run_prepare("pcam", tmp_path, tmp_path / "out", split="train")
    assert sorted(str(at) for at in reads if at != slice(None)) == [f"slice({n}, {n + 2}, None)" for n in (0, 2, 4)]


def damaged_cars(folder: Path) -> str:
    cars(folder, "train")
    savemat(folder / "devkit" / "cars_train_annos.mat", {"annotations": np.arange(3)})
    return source_error("cars", folder)


def test_an_archive_must_be_unpacked(tmp_path: Path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"")
    line = source_error("mnist", tmp_path)
    assert line.endswith("expected train-images-idx3-ubyte in it; train-images-idx3-ubyte.gz must be unpacked first")
