"""The suite of 18 sets, of which few are there."""

import json
from pathlib import Path

import pytest
import torch

from eagleray.base.errors import UserError
from eagleray.datasets.catalogue import DATASETS
from eagleray.datasets.multilabel import bits
from eagleray.protocols import classification_scores
from eagleray.protocols.catalogue import SuiteOf18
from eagleray.protocols.features import LabelledFeatures, SuiteFeatures
from eagleray.protocols.suite import SUITE, read_reference, suite


def features(url: str) -> LabelledFeatures:
    """Of two classes that are easily told apart; the place's last part says which images they are."""
    g = torch.Generator().manual_seed(len(url.rpartition("/")[2]))
    y = torch.arange(40) % 2
    x = torch.randn(40, 3, generator=g) + 9 * y[:, None]
    if "voc2007" in url:
        y = torch.tensor([bits([int(c % 2 == k) for c in range(20)]) for k in y.tolist()])
    return LabelledFeatures(x, y)


def make(root: Path, *places: str) -> str:
    for place in places:
        (root / place).mkdir(parents=True)
        (root / place / "shard-000000.tar").touch()
    return str(root)


def test_what_is_not_there_is_listed_and_the_rest_is_scored(tmp_path: Path):
    root = make(tmp_path, "cifar-10/train", "cifar-10/test", "pets/trainval", "pets/test", "mnist/train")
    notes: list[str] = []
    numbers = {"suite/cifar-10": 99.0, "suite/pets": 100.0, "suite/mnist": 1.0, "suite/average": 3.0}
    results = [{"protocol": name, "numbers": n} for name, n in (("suite", {}), ("suite", numbers), ("knn", {}))]
    (tmp_path / "results.json").write_text(json.dumps(results))
    found = suite(SuiteFeatures(root, features, "swin_tiny"), SuiteOf18(reference=str(tmp_path)), notes.append)
    assert found.numbers == {
        "suite/cifar-10": 100,
        "suite/pets": 100,
        "suite/average": 100,
        "suite/sets": 2,
        "suite/reference": 99.5,
        "suite/wins": 1,
    }
    assert found.settings["missing"] == ", ".join(n for n in SUITE if n not in ("cifar-10", "pets"))
    missing = found.settings["reasons"]
    assert missing.keys() == SUITE.keys() - {"cifar-10", "pets"}
    assert missing["mnist"] == f"{root}/mnist/test: no shards in this folder"
    assert [n for n in notes if n.startswith("mnist")] == [
        f"mnist: left out: {root}/mnist/test: no shards in this folder"
    ]
    assert found.settings["pets"]["metric"] == "mean_per_class"
    assert found.settings["cifar-10"]["of"] == [50_000, 10_000]


def test_a_validation_split_that_is_there_finds_lambda(tmp_path: Path):
    root = make(tmp_path, *(f"flowers-102/{s}" for s in ("train", "val", "test")))
    assert suite(SuiteFeatures(root, features)).settings["flowers-102"]["validation"] == "40 images, given"
    (tmp_path / "flowers-102" / "val" / "shard-000000.tar").unlink()
    make(tmp_path, "mnist/train", "mnist/test")
    missing = suite(SuiteFeatures(root, features)).settings["reasons"]
    assert missing["flowers-102"].endswith("/trainval: no shards in this folder, nor in both train and val beside it")


@pytest.mark.slow
def test_several_classes_are_read_from_one_label(tmp_path: Path):
    root = make(tmp_path, "voc2007/trainval", "voc2007/test")
    assert suite(SuiteFeatures(root, features)).numbers["suite/voc2007"] == pytest.approx(100)


def test_labels_of_another_set_are_refused_and_the_others_go_on(tmp_path: Path):
    root = make(tmp_path, "pcam/trainval", "pcam/test", "mnist/train", "mnist/test")

    def strange(url: str) -> LabelledFeatures:
        x, y = features(url)
        return LabelledFeatures(x, y * 2) if "pcam" in url else LabelledFeatures(x, y)

    found = suite(SuiteFeatures(root, strange))
    assert found.settings["reasons"]["pcam"] == f"{root}/pcam/trainval: label 2 is too large; pcam has 2 classes"
    assert found.numbers["suite/sets"] == 1


@pytest.mark.parametrize(
    ("model", "reference"),
    [("swin_tiny_patch4_window7_224", 94.0), ("resnet50", 91.8), ("swin_small_patch4_window7_224", None), ("", None)],
)
def test_wins_are_counted_against_the_same_backbone_alone(model: str, reference: float | None, tmp_path: Path):
    root = make(tmp_path, "cifar-10/train", "cifar-10/test")
    found = suite(SuiteFeatures(root, features, model))
    assert found.numbers.get("suite/reference") == reference
    assert found.numbers.get("suite/wins") == (None if reference is None else 1)


def test_the_reference_is_the_trained_backbone(tmp_path: Path):
    results = [
        {"protocol": "suite", "untrained": untrained, "numbers": {"suite/mnist": value}}
        for untrained, value in ((False, 1.0), (False, 98.0), (True, 11.0))  # in the order in which they are written
    ]
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert read_reference(str(tmp_path)) == {"mnist": 98.0}
    (tmp_path / "results.json").write_text(json.dumps(results[2:]))
    assert read_reference(str(tmp_path)) == {"mnist": 11.0}


@pytest.mark.parametrize("text", ["{}", "[]", "no list", '[{"protocol": "knn", "numbers": {}}]', "[1]"])
def test_a_reference_without_results_is_one_line(text: str, tmp_path: Path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=r"^--reference \S+: \S+results.json holds no results of the suite$"):
        suite(SuiteFeatures(str(tmp_path), features), SuiteOf18(reference=str(tmp_path)))


def test_nothing_there_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"none of the 18 datasets can be used; .*food-101/test: no shards"):
        suite(SuiteFeatures(str(tmp_path), features))


def test_the_table_is_the_papers():
    assert len(SUITE) == 18
    assert SUITE.keys() <= DATASETS.keys()
    assert {row.metric for row in SUITE.values()} == classification_scores.METRICS.keys()
    averages = [sum(column) / 18 for column in zip(*(row[1:] for row in SUITE.values()), strict=True)]
    assert averages == pytest.approx([75.43, 77.29, 80.99], abs=0.02)
    assert sum(row.esvit >= row.swint for row in SUITE.values()) == 17, "as the paper counts, with MNIST's draw"
    sizes = {  # table 10's; it says 102 classes of Food-101, 8 of FER2013 and 26,728 images of GTSRB
        "food-101": (101, 75_750, 25_250),
        "cars": (196, 8_144, 8_041),
        "aircraft": (100, 6_667, 3_333),
        "voc2007": (20, 5_011, 4_952),
        "dtd": (47, 3_760, 1_880),
        "caltech-101": (102, 3_060, 6_084),
        "fer2013": (7, 32_298, 3_589),
        "stl10": (10, 5_000, 8_000),
        "gtsrb": (43, 26_640, 12_630),
        "pcam": (2, 294_912, 32_768),
        "ucf101": (101, 9_537, 3_783),
        "hateful-memes": (2, 8_500, 500),
    }
    for name, (classes, *images) in sizes.items():
        assert [DATASETS[name].classes, *list(DATASETS[name].splits.values())[:2]] == [classes, *images], name
    for name in ("aircraft", "dtd", "voc2007", "fer2013", "pcam"):
        s = DATASETS[name].splits
        assert s["train"] + s["val"] == s["trainval"], name
