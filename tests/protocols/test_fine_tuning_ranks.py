"""Fine-tuning on several ranks: the same batches, averaged gradients, batch norm over all of them, one who writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.annotated import coco, masks
from helpers.ranks import on_ranks
from PIL import Image
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from eagleray.base.errors import UserError
from eagleray.dense.catalogue import Detection, Segmentation
from eagleray.dense.detection import detection as detecting
from eagleray.dense.detection import train as training
from eagleray.dense.detection.data import Coco
from eagleray.dense.segmentation import heads
from eagleray.dense.segmentation import segmentation as segmenting
from eagleray.models.backbone import Backbone
from eagleray.protocols import fine_tuning
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Workspace

STEPS = 4


def resnet() -> Backbone:
    """A network with batch norm, in training and behind a head that has it too."""
    torch.manual_seed(0)
    return Backbone("test_resnet")


def segment(folder: Path, out: Path, steps: int = STEPS, stop: int = STEPS, batch: int = 5) -> Outcome:
    """Fine-tune in float64, without dropout, which each rank draws for itself, and with a checkpoint after every step;
    end early after `stop` steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "DROPOUT", 0.0)
        patch.setattr(fine_tuning, "SAVE_SECONDS", -1.0)
        patch.setattr(segmenting, "Segmenter", Doubled)
        return _segment(folder, out, steps, stop, batch)


def _segment(folder: Path, out: Path, steps: int, stop: int, batch: int) -> Outcome:
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        if f"step {stop}/{steps}" in line and stop < steps:
            raise KeyboardInterrupt

    try:
        outcome = segmenting.segmentation(
            resnet(), folder, Segmentation(steps=steps, batch=batch, size=32, width=16, lr=1e-3), Workspace(out, note)
        )
    except KeyboardInterrupt:
        return Outcome({}, {"notes": notes})
    return Outcome(outcome.numbers, {**outcome.settings, "notes": notes}, outcome.pictures)


class Doubled(segmenting.Segmenter):
    """A network of float64, which gets images of float64."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.double()

    def raw(self, x: torch.Tensor) -> list[torch.Tensor]:
        return super().raw(x.double())


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint of a training."""
    path = max(out.glob("*/step-*.pt"))
    return torch.load(path, weights_only=True)["net"]


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns(tmp_path: Path):
    """Five images on two and three ranks: uneven shares, crops with different numbers of pixels that count."""
    folder = masks(tmp_path / "set", count=3)
    one = segment(folder, tmp_path / "1")
    before = weights(tmp_path / "1")
    for ranks in (2, 3):
        first, *others = on_ranks(ranks, segment, tmp_path, folder, tmp_path / str(ranks))
        assert all(other.numbers == {} for other in others)
        assert first.numbers == pytest.approx(one.numbers)
        for ours, theirs in zip(first.pictures, one.pictures, strict=True):
            same = np.asarray(Image.open(ours)) == np.asarray(Image.open(theirs))
            assert same.mean() > 0.999  # where two classes are equally likely, a rounding decides
        assert losses(first) == pytest.approx(losses(one), abs=2e-3)  # as printed
        for name, x in weights(tmp_path / str(ranks)).items():
            torch.testing.assert_close(x, before[name], rtol=1e-5, atol=1e-7, msg=f"{ranks} ranks: {name}")
    [table] = {(tmp_path / str(ranks) / "segmentation-fpn.csv").read_text() for ranks in (1, 2, 3)}
    assert len(table.splitlines()) == 3


def test_the_backbone_of_a_momentum_teacher_is_trained_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its parameters have no gradients when it comes."""
    teacher = resnet().requires_grad_(False)
    monkeypatch.setitem(globals(), "resnet", lambda: teacher)
    segment(masks(tmp_path / "set"), tmp_path / "out", steps=1, stop=1, batch=2)
    name, stem = next(teacher.named_parameters())
    after = weights(tmp_path / "out")
    assert not torch.equal(after[f"maps.backbone.{name}"].float(), stem)


def losses(outcome: Outcome) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in outcome.settings["notes"] if "loss " in line]


@pytest.mark.slow
def test_a_training_continues_on_another_number_of_ranks(tmp_path: Path):
    folder = masks(tmp_path / "set", count=3)
    segment(folder, tmp_path / "whole")
    for before, after in ((2, 1), (1, 3)):
        out = tmp_path / f"{before}-{after}"
        assert on_ranks(before, segment, tmp_path, folder, out, STEPS, 3)[0].numbers == {}
        again = on_ranks(after, segment, tmp_path, folder, out)[0]
        assert f"segmentation: continues after step 2 of {STEPS}" in again.settings["notes"]
        for name, x in weights(out).items():
            torch.testing.assert_close(x, weights(tmp_path / "whole")[name], rtol=1e-5, atol=1e-7, msg=name)


def refusal(folder: Path, out: Path) -> str:
    try:
        segment(folder, out, batch=2)
    except UserError as e:
        return str(e)
    return ""


def test_more_ranks_than_images_in_a_batch_are_refused(tmp_path: Path):
    said = on_ranks(3, refusal, tmp_path, masks(tmp_path / "set"), tmp_path / "out")
    assert said == ["--workers 3: expected at most 2, the images of a batch"] * 3


def detect(folder: Path, out: Path) -> tuple[Outcome, float]:
    """Fine-tune a detector; return the sum of its weights on this rank too."""
    nets: list[Any] = []
    build = detecting.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detecting, "build", lambda *args: nets.append(build(*args)) or nets[0])
        outcome = detecting.detection(
            resnet(), folder, Detection(schedule=str(folder / "schedule.yaml")), Workspace(out, lambda _: None)
        )
    return outcome, float(sum(p.double().abs().sum() for p in nets[0].state_dict().values()))


C4 = {"head": "c4", "optimizer": "sgd", "parts": "detectron2", "crop": True, "sizes": [48, 64]}


@pytest.mark.parametrize("settings", [{}, C4], ids=["pyramid", "C4"])
@pytest.mark.slow
def test_a_detector_is_trained_and_tested_by_ranks_together(settings: dict[str, Any], tmp_path: Path):
    """All ranks have the same weights in the end. One process that reads their checkpoint measures the same numbers of
    the validation images that they had divided, and draws the same picture."""
    folder = coco(tmp_path / "set", count=3)
    schedule = folder / "schedule.yaml"
    schedule.write_text(json.dumps(json.loads(schedule.read_text()) | settings))
    (first, weight), (second, same) = on_ranks(2, detect, tmp_path, folder, tmp_path / "out")
    assert weight == same
    assert (second.numbers, second.pictures) == ({}, ())
    picture = first.pictures[0].read_bytes()
    alone, its = detect(folder, tmp_path / "out")
    assert its == weight, "the training is over"
    assert alone.numbers == first.numbers
    assert alone.pictures[0].read_bytes() == picture


def examples(folder: Path) -> list[Any]:
    """The images of this rank, with what makes them different: their order and their mirroring."""
    how = training.load_schedule(str(folder / "schedule.yaml"))
    data = replace(Coco.of(folder, "train"), flip=True)
    parts = training.batches(data, list(range(5)), how, fine_tuning.divide(5), 1)
    return [[example.image.numpy() for example in batch.examples] for _, batch in parts]


def test_ranks_divide_the_batches_of_one_process(tmp_path: Path):
    folder = coco(tmp_path / "set", count=5)
    [one], several = on_ranks(1, examples, tmp_path, folder), on_ranks(3, examples, tmp_path, folder)
    assert len(one) == 2
    for step, batch in enumerate(one):
        joined = [image for rank in several for image in rank[step]]
        assert [x.tolist() for x in joined] == [x.tolist() for x in batch]
        assert [len(rank[step]) for rank in several] == [2, 2, 1]


def test_the_sizes_of_images_are_those_that_one_process_draws(tmp_path: Path):
    sizes = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    transform = GeneralizedRCNNTransform(list(sizes), 1333, [0.5] * 3, [0.5] * 3)
    torch.manual_seed(hash((7, 3, 0)) & 0x7FFFFFFF)  # as the training loop does before a step
    assert training.draw_sizes(sizes, (7, 3, 0), 40) == [transform.torch_choice(list(sizes)) for _ in range(40)]
