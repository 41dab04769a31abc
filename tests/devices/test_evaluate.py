"""Evaluation protocols on the simulated device: their numbers are those of the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.annotated import coco, davis, masks
from helpers.networks import VIT
from helpers.simulated_device import DEVICE, simulated

from eagleray.engine import precision
from eagleray.evaluation import evaluate
from eagleray.evaluation.registry import SHIPPED
from eagleray.evaluation.target import Target
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network
from eagleray.protocols.settings import Evaluate

MEASURED = ("images_per_s", "step_s", "forward_mib", "step_mib")  # by a clock, or by another count of memory

PROTOCOLS: dict[str, dict[str, str]] = {  # their settings
    "knn": {"k": "7"},
    "linear": {"epochs": "2"},
    "linear@dino": {"epochs": "2"},
    "linear_augmented": {"epochs": "2", "batch": "64", "rates": "0.1,1"},
    "semi_supervised": {"epochs": "2", "batch": "64", "labels": "0.5"},
    "logistic": {},
    "correspondence": {"limit": "20"},
    "throughput": {"rounds": "1", "batch": "2"},
    "attention": {"size": "32", "limit": "20"},
    "components": {"size": "32", "images": "2"},
    "neighbours": {"size": "32", "limit": "20", "queries": "2"},
    "pairs": {"size": "32", "images": "2"},
    "segmentation": {"steps": "3", "batch": "2", "size": "32", "width": "32", "lr": "1e-3"},
    "davis": {"size": "32"},
    "detection": {"schedule": "{coco}/schedule.yaml"},
    "positives": {"size": "16", "chosen": "2"},
    "suite": {},
}
SLOW = ("logistic", "detection", "suite")


@pytest.fixture
def inputs(shards: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of a request that name its data."""
    return {
        "train": str(shards / "train"),
        "test": str(shards / "test"),
        "folders": {
            "masks": str(masks(tmp_path / "masks")),
            "davis": str(davis(tmp_path / "davis")),
            "coco": str(coco(tmp_path / "coco")),
            "suite": str(suite(tmp_path / "suite", shards)),
        },
    }


def suite(folder: Path, shards: Path) -> Path:
    """Name the drawn pictures as if they were a dataset of the suite."""
    folder.mkdir()
    (folder / "cifar-100").symlink_to(shards)
    return folder


def numbers(
    name: str, inputs: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> dict[str, float]:
    """Return the numbers of a protocol, measured on the device of this process, which is to be `device`."""
    kind, options = "vit_tiny_patch16_224", VIT | {"depth": 4}
    torch.manual_seed(0)
    backbone = Backbone(kind, options=options).eval()
    target = Target("tests", backbone, Network(name=kind, options=options), Evaluate(size=16, resize=16))
    with monkeypatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(out / "cache"))  # features of the other device are not taken from there
        patched.setattr(evaluate, "load_target", lambda *_: target)
        settings = PROTOCOLS[name].items()
        asked = {f"{name}.{key}": value.format(**inputs["folders"]) for key, value in settings}
        report = evaluate.evaluate(evaluate.Request("tests", [name], out=str(out), settings=asked, **inputs))
    assert report.refused == []
    assert next(backbone.parameters()).device == device
    [result] = report.results
    assert all((out / picture).exists() for picture in result.pictures)
    return {key.partition("/")[2]: value for key, value in result.numbers.items()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PROTOCOLS])
def test_a_protocol_measures_on_the_device_what_it_measures_on_the_cpu(
    name: str, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "compute_dtype", lambda *_: torch.float32)
    want = numbers(name, inputs, tmp_path / "cpu", monkeypatch, torch.device("cpu"))
    with simulated() as waits:
        got = numbers(name, inputs, tmp_path / "device", monkeypatch, DEVICE)
    assert waits
    assert got.keys() == want.keys()
    for key in got.keys() - set(MEASURED):
        assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-4), key


def test_no_protocol_is_left_out() -> None:
    """The variants of one protocol differ in the values of its settings."""
    assert {SHIPPED[name].kind for name in PROTOCOLS} == {p.kind for p in SHIPPED.values()}
