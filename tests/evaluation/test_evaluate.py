"""What `eagleray evaluate` passes to a protocol."""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.annotated import masks

from eagleray.api.evaluate import Refused, Scores
from eagleray.base.errors import UserError
from eagleray.config import plugins
from eagleray.evaluation import data, results
from eagleray.evaluation.evaluate import Report, Request, evaluate
from eagleray.evaluation.extraction import Task
from eagleray.evaluation.results import NOT_RUN, Result, picture_folder
from eagleray.protocols import fine_tuning
from eagleray.protocols.features import LabelledFeatures

DRAWERS = """
from eagleray import FeatureProtocol, Outcome, register
from eagleray.protocols.needs import Suite
from eagleray.protocols.protocol import FrozenProtocol


@register.protocol("sketch")
class Sketch(FeatureProtocol):
    about = "a picture of two sets"

    def run(self, backbone, data, workspace) -> Outcome:
        picture = workspace.out / "sketch.png"
        picture.write_bytes(b"two")
        return Outcome({"sketch/images": len(data.test.y)}, {}, (picture,))


@register.protocol("album")
class Album(FrozenProtocol):
    about = "a picture of the suite"

    def data(self) -> Suite:
        return Suite(self.features, self.size, self.resize)

    def run(self, backbone, data, workspace) -> Outcome:
        picture = workspace.out / "album.png"
        picture.write_bytes(b"suite")
        return Outcome({"album/images": len(data.read(f"{data.root}/test").y)}, {}, (picture,))
"""


@pytest.fixture
def drawers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plug-in with protocols on features that draw."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "drawers_of_tests.py").write_text(DRAWERS)
    plugins.load(str(tmp_path / "drawers_of_tests.py"))
    yield
    plugins.unload()


@pytest.mark.usefixtures("drawers")
def test_protocols_on_features_get_a_folder_for_pictures(shards: Path, tmp_path: Path):
    data = {"train": str(shards / "train"), "test": str(shards / "test"), "folders": {"suite": str(shards)}}
    settings = {"size": "32", "resize": "32"}
    asked = Request("untrained:test_vit", ["sketch", "album"], **data, settings=settings, out=str(tmp_path / "out"))  # type: ignore[arg-type]
    report = evaluate(asked, note=lambda _: None)
    assert not report.refused
    assert [r.pictures for r in report.results] == [[f"pictures/untrained/{n}.png"] for n in ("sketch", "album")]
    assert (tmp_path / "out" / "pictures" / "untrained" / "album.png").read_bytes() == b"suite"


@pytest.mark.usefixtures("drawers")
def test_an_evaluation_with_other_settings_keeps_the_pictures_of_the_first(shards: Path, tmp_path: Path):
    data = {"train": str(shards / "train"), "test": str(shards / "test")}

    def places(resize: str) -> list[str]:
        settings = {"size": "32", "resize": resize}
        asked = Request("untrained:test_vit", ["sketch"], **data, settings=settings, out=str(tmp_path / "out"))  # type: ignore[arg-type]
        return list(evaluate(asked, note=lambda _: None).results[0].pictures)

    assert [places(resize) for resize in ("32", "36", "40", "36", "32")] == [
        ["pictures/untrained/sketch.png"],
        ["pictures/untrained/2/sketch.png"],
        ["pictures/untrained/3/sketch.png"],
        ["pictures/untrained/2/sketch.png"],  # the same evaluation again
        ["pictures/untrained/sketch.png"],
    ]
    assert len(list((tmp_path / "out").rglob("sketch.png"))) == 3


def test_evaluations_at_the_same_time_draw_into_folders_of_their_own(tmp_path: Path):
    def new(k: int) -> Result:
        known = {"backbone": "a", "untrained": False, "backbone_digest": "", "architecture": "", "data": {}}
        return Result("sketch", **known, **NOT_RUN, asked={"k": k})  # type: ignore[arg-type]

    first, second = tmp_path / "pictures", tmp_path / "pictures" / "2"
    with picture_folder(str(tmp_path), new(1)) as one, picture_folder(str(tmp_path), new(2)) as other:
        assert [one, other] == [first, second]
    with picture_folder(str(tmp_path), new(2)) as one:
        assert one == first, "neither has left a result"


def test_scores_come_whole_from_another_process_whatever_their_names():
    known = {"backbone": "a", "untrained": False, "backbone_digest": "", "architecture": "", "data": {}}
    numbers = {"sketch/images": 3, "mean": 0.5, "variance": 2.0}
    report = Report([Result("sketch", **known, **(NOT_RUN | {"numbers": numbers}))])  # type: ignore[arg-type]
    error = pickle.loads(pickle.dumps(Refused(["one", "two"], Scores(report))))
    assert (str(error), error.scores) == ("one; two", {"sketch/images": 3, "sketch/mean": 0.5, "sketch/variance": 2.0})


def test_features_that_are_not_finite_are_refused(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One NaN would be the nearest neighbour of every image, and every class of a linear probe would be 0."""

    def damaged(_: object, index: object, task: Task, **more: object) -> dict[str, LabelledFeatures]:
        x = torch.randn(len(task.samples), 8)
        x[5, 3], x[7, 0] = torch.nan, torch.inf
        return {"pooled": LabelledFeatures(x, torch.arange(len(x)) % 2)}

    monkeypatch.setattr(data, "features", damaged)
    monkeypatch.setattr(data, "ROWS", 6)
    asked = Request("untrained:test_vit", ["knn"], str(shards / "train"), str(shards / "test"), out=str(tmp_path))
    assert evaluate(asked, note=lambda _: None).refused == [
        f"knn: {shards / 'train'}: the features of 2 of 320 images are not finite numbers; the weights are damaged, or "
        "they overflow the number format in which the device computes"
    ]


def test_a_training_is_continued_after_another_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    searched: list[str] = []

    def newest(folder: str, _: Path) -> None:
        searched.append(folder)
        raise UserError("this is far enough")

    monkeypatch.setattr(fine_tuning.checkpoint, "newest", newest)
    settings, out = {"size": "32", "steps": "1", "width": "16", "batch": "16"}, str(tmp_path / "out")
    folders = {"masks": str(masks(tmp_path / "m"))}
    asked = Request("untrained:test_vit", ["segmentation"], folders=folders, settings=settings, out=out)
    evaluate(asked)
    known = {"backbone": "b", "untrained": True, "backbone_digest": "other", "architecture": "", "data": {}}
    pictures = ["pictures/untrained/segmentation-fpn.png"]
    results.add(out, Result("segmentation", **known, **(NOT_RUN | {"pictures": pictures})))  # type: ignore[arg-type]
    evaluate(asked)
    assert searched[0] == searched[1]


@pytest.mark.usefixtures("drawers")
def test_the_digest_of_a_suite_is_of_the_sets_that_were_read(shards: Path, tmp_path: Path):
    def digest(root: Path) -> str:
        settings, folders = {"size": "32", "resize": "32"}, {"suite": str(root)}
        out = str(tmp_path / "out")
        asked = Request("untrained:test_vit", ["album"], folders=folders, settings=settings, out=out)
        return evaluate(asked, note=lambda _: None).results[0].data_digest

    shutil.copytree(shards / "train", tmp_path / "other" / "test")
    first = digest(shards)
    assert digest(shards) == first
    assert digest(tmp_path / "other") != first
