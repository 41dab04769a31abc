"""Boxes say where in the image each pixel of a view is from: pictures whose pixels hold their own coordinates."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pictures import Member, encode, write_tar
from PIL import Image

from eagleray.config.view import View
from eagleray.data.batch import Batch
from eagleray.data.index import open_index
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.views import colours, sampling
from eagleray.views.sampling import Views

SIZE, EDGE = 16, 3  # pixels of a view, and of the border that resizing changes
LEVELS = 2 / 255  # of the pixels of a lossless or smooth picture
PLAIN = View(size=SIZE, count=2, scale=(0.2, 1.0), jitter=0.0, gray=0.0)
VIEWS = Views.of([PLAIN, replace(PLAIN, count=1, same_crop=True), replace(PLAIN, count=1, size=2 * SIZE, flip=1.0)])
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def coordinates(height: int, width: int) -> Image.Image:
    """A picture whose red is x and whose green is y, from 0 at its upper left to 1 at its lower right corner."""
    y, x = np.meshgrid(*((np.arange(n) + 0.5) / n for n in (height, width)), indexing="ij")
    return Image.fromarray(np.rint(255 * np.stack([x, y, 0 * x], -1)).astype(np.uint8))


def member(number: int) -> list[Member]:
    """A PNG, a JPEG, a JPEG whose camera was held upright, or a broken one."""
    height, width = 160 + 41 * (number % 7), 190 + 63 * (number % 5)
    name = f"s{number:04d}"
    if number % 9 == 4:
        return [(f"{name}.jpg", b"\xff\xd8 no image"), (f"{name}.cls", b"0")]
    if number % 3 == 0:
        return [(f"{name}.png", encode(coordinates(height, width), "PNG")), (f"{name}.cls", b"0")]
    picture, exif = coordinates(height, width), Image.Exif()
    if number % 3 == 1:
        picture, exif[0x112] = picture.transpose(Image.Transpose.ROTATE_90), 6
    return [(f"{name}.jpg", encode(picture, quality=98, subsampling=0, exif=exif)), (f"{name}.cls", b"0")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coordinates")
    for shard in range(2):
        members = [m for number in range(24 * shard, 24 * shard + 24) for m in member(number)]
        write_tar(folder / f"x-{shard:03d}.tar", members)
    return folder


def stream(folder: Path, *, scaled: bool = False, boxes: bool = True) -> Stream:
    return Stream(open_index(str(folder), note=lambda _: None), VIEWS, 7, 4, 8, scaled=scaled, boxes=boxes)


def batches(s: Stream, *, workers: int = 0, rank: int = 0, ranks: int = 1, steps: int = 6) -> list[Batch]:
    loader = Loader(s, rank=rank, ranks=ranks, workers=workers, device=torch.device("cpu"))
    return [batch for batch, _ in islice(loader.batches(0), steps)]


@pytest.mark.parametrize("scaled", [False, True])
def test_every_pixel_is_from_where_its_box_says(folder: Path, scaled: bool) -> None:
    flipped = 0
    for batch in batches(stream(folder, scaled=scaled)):
        assert batch.boxes is not None
        for view, boxes in zip(batch.views, batch.boxes, strict=True):
            mean, std = (torch.tensor(c).view(3, 1, 1) for c in (colours.MEAN, colours.STD))
            x, y, _ = (view * std + mean).unbind(1)  # (B, S, S)
            at = (torch.arange(view.shape[-1]) + 0.5) / view.shape[-1]
            left, top, right, bottom = boxes.T[:, :, None]
            inner = slice(EDGE, -EDGE)
            # The last pixels of an image at a quarter of its size are in part from outside of it.
            near = LEVELS + (3 / 160 if scaled else 0)
            assert (x - (left + at * (right - left))[:, None, :])[:, inner, inner].abs().max() < near
            assert (y - (top + at * (bottom - top))[:, :, None])[:, inner, inner].abs().max() < near
            assert (top < bottom).all()
            flipped += int((left > right).sum())
    assert 6 * 8 * 4 > flipped > 6 * 8  # every view at the end, and some of the others


def test_any_split_of_the_work_gives_the_same_boxes(folder: Path) -> None:
    s = stream(folder)
    alone = batches(s)
    for workers, ranks in ((0, 2), (3, 1)):
        shares = [batches(s, workers=workers, rank=rank, ranks=ranks) for rank in range(ranks)]
        for batch, *parts in zip(alone, *shares, strict=True):
            assert torch.equal(torch.cat([p.boxes for p in parts], 1), batch.boxes)


def test_boxes_change_nothing_else_and_are_not_made_unless_asked_for(folder: Path) -> None:
    for ours, plain in zip(batches(stream(folder)), batches(stream(folder, boxes=False)), strict=True):
        assert plain.boxes is None
        assert torch.equal(ours.index, plain.index)
        assert all(torch.equal(a, b) for a, b in zip(ours.views, plain.views, strict=True))


def test_a_whole_image_is_from_0_to_1() -> None:
    boxes = np.array([[0, 0, 30, 50], [15, 10, 15, 40]])
    assert sampling.shares(boxes, 30, 50).tolist() == [[0, 0, 1, 1], pytest.approx([0.2, 0.5, 1, 1])]
