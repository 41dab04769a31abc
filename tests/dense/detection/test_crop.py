"""Crops of images for detection: boxes and masks follow, and they are drawn from the seed, the epoch and the image."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import annotated

from eagleray.dense.detection import detection as protocol
from eagleray.dense.detection.data import CROP_SHORTS, Coco, cut, draw_crop
from eagleray.dense.detection.train import batches, fit, load_schedule
from eagleray.models.backbone import Backbone
from eagleray.protocols import fine_tuning

SHAPES = [(480, 640), (640, 427), (300, 1000), (32, 32), (1, 1), (2, 1), (1, 3000), (5000, 30)]


@pytest.mark.parametrize("shape", SHAPES)
def test_crops_lie_in_the_image_and_have_the_sides_of_detr(shape: tuple[int, int]):
    for seed in range(100):
        x0, y0, x1, y1 = draw_crop(np.random.default_rng(seed), shape)
        assert 0 <= y0 < y1 <= shape[0]
        assert 0 <= x0 < x1 <= shape[1]
        fits = []
        for short in CROP_SHORTS:
            scale = min(short / min(shape), 1333 / max(shape))
            ends = ((y1 - y0, shape[0]), (x1 - x0, shape[1]))
            fits.append(all(min(384, s * scale) - 1 <= n * scale <= 600 + 2 * scale for n, s in ends))
        assert any(fits)


def test_crops_differ_and_reach_every_border():
    crops = [draw_crop(np.random.default_rng(seed), (480, 640)) for seed in range(2000)]
    x0, y0, x1, y1 = map(np.array, zip(*crops, strict=True))
    assert len(set(crops)) > 1000
    assert (x0.min(), y0.min(), x1.max(), y1.max()) == (0, 0, 640, 480)
    assert (x1 - x0).min() < 640 * 384 / 800 + 2, "384 of 800 pixels"


def test_boxes_and_masks_are_cut_with_the_image():
    """Rectangles of one colour each: after a crop, a mask is all of its box and its pixels have the same colour."""
    rng = np.random.default_rng(0)
    image, masks, boxes = torch.zeros(3, 60, 80, dtype=torch.uint8), torch.zeros(6, 60, 80, dtype=torch.uint8), []
    for i in range(6):
        y0, x0 = 20 * (i // 3) + rng.integers(8), 26 * (i % 3) + rng.integers(8)
        boxes.append([x0, y0, x0 + 9, y0 + 7])
        masks[i, y0 : y0 + 7, x0 : x0 + 9] = 1
        image[:, masks[i] > 0] = i + 1
    target = {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.arange(1, 7), "masks": masks}
    remained = set()
    for _ in range(200):
        (x0, x1), (y0, y1) = sorted(rng.choice(81, 2, replace=False)), sorted(rng.choice(61, 2, replace=False))
        part, after = cut(image, target, (x0, y0, x1, y1))
        assert part.equal(image[:, y0:y1, x0:x1])
        seen = set((part[0].unique() - 1).tolist()) - {255}
        assert set((after["labels"] - 1).tolist()) == seen, "what is seen remains, and nothing else"
        remained.add(len(seen))
        for box, label, mask in zip(after["boxes"], after["labels"], after["masks"], strict=True):
            a, b, c, d = box.int().tolist()
            assert (a, b) >= (0, 0)
            assert mask.sum() == mask[b:d, a:c].sum() == (c - a) * (d - b)
            assert (part[0] == label).equal(mask > 0)
    assert {0, 6} <= remained


def test_half_of_the_images_are_cropped_by_seed_epoch_and_image(tmp_path: Path):
    data = dataclasses.replace(Coco.of(annotated.coco(tmp_path, count=8), "train"), crop=0)
    places = [(i, epoch) for i in range(8) for epoch in range(25)]
    shapes = {place: data[place].image.shape for place in places}
    assert shapes == {place: data[place].image.shape for place in reversed(places)}
    whole = sum(shape == (3, 32, 32) for shape in shapes.values())
    assert 95 < whole < 140, "half of them, and the crops that take all"
    other = dataclasses.replace(data, crop=1)
    assert sum(other[place].image.shape != shapes[place] for place in places) > 60
    assert all(len({shapes[i, epoch] for epoch in range(25)}) > 5 for i in range(8))


@pytest.fixture
def schedule(tmp_path: Path) -> str:
    settings = {"sizes": [48, 64, 80], "longest": 80, "crop": True, "batch": 2, "epochs": 4, "drop_path": 0.0}
    settings |= {"channels": 16, "regions": 16, "anchor": 4, "lr": {"value": 1e-3}}
    path = tmp_path / "crops.yaml"
    path.write_text(json.dumps(settings))
    return str(path)


def test_the_order_of_crops_does_not_depend_on_where_it_begins(schedule: str, tmp_path: Path):
    how = load_schedule(schedule)
    data = dataclasses.replace(Coco.of(annotated.coco(tmp_path / "set", count=4), "train"), crop=how.seed)
    whole = [[e.image for e in batch.examples] for _, batch in batches(data, range(4), how, (2,), 0)]
    late = [[e.image for e in batch.examples] for _, batch in batches(data, range(4), how, (2,), 3)]
    assert len(whole) == 8
    assert all(x.equal(y) for a, b in zip(whole[3:], late, strict=True) for x, y in zip(a, b, strict=True))


def test_a_training_on_crops_that_was_stopped_goes_on_as_if_it_had_not(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fine_tuning, "SAVE_SECONDS", 0.0)
    data, how = Coco.of(annotated.coco(tmp_path / "set", count=2), "train"), load_schedule(schedule)

    def train(folder: str, note: Callable[[str], None]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        net = protocol.build(Backbone("test_resnet"), 1, how)
        fit(net, data, how, str(tmp_path / folder), tmp_path / folder, note)
        return net.state_dict()

    def stop(line: str) -> None:
        if "step 3/4" in line:
            raise KeyboardInterrupt

    whole = train("whole", print)
    with pytest.raises(KeyboardInterrupt):
        train("part", stop)
    again = train("part", print)
    assert all(v.equal(whole[k]) for k, v in again.items())
