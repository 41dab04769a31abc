"""The card of a set, what is told of shards without one, and the pictures of both."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import refused
from helpers.layouts import fill, run_prepare
from helpers.pictures import encode, jpeg, picture, spoiled, write_shards
from PIL import Image
from typer.testing import CliRunner

from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.data.pixels import read_pixels
from eagleray.datasets import card, contact_sheet
from eagleray.datasets.describe import describe
from eagleray.datasets.stats import ASPECTS, EXAMPLES, OTHER, REASONS, SIDES, ImageStats, fit_within, image_format
from eagleray.reports.data_plots import map_uri


def counted(*sizes: tuple[int, int]) -> ImageStats:
    stats = ImageStats()
    for height, width in sizes:
        stats.count(jpeg(1), height, width)
    return stats


def test_censuses_add_up():
    a, b = counted((10, 20), (300, 400)), counted((300, 400), (9000, 9000))
    a.drop("small", "x")
    for i in range(30):
        b.drop("small", f"y{i}")
    b.drop("broken", "z")
    a.add(b)
    assert a.images == 4
    assert a.formats == {"JPEG": 4}
    assert sum(a.sides) == sum(a.aspects) == 4
    assert (a.sides[0], a.sides[-1]) == (1, 1)
    assert a.dropped["small"].count == 31
    assert a.dropped["small"].examples == ["x", *(f"y{i}" for i in range(EXAMPLES - 1))]
    assert a.dropped["broken"].examples == ["z"]
    assert ImageStats.from_json(json.loads(json.dumps(a.to_json()))) == a


def test_no_more_reasons_than_a_person_reads():
    stats = ImageStats()
    for i in range(REASONS + 5):
        stats.drop(f"reason {i}", "key")
    assert len(stats.dropped) == REASONS + 1
    assert stats.dropped[OTHER].count == 5
    assert stats.dropped[OTHER].examples[0] == f"key: reason {REASONS}"


@pytest.mark.parametrize(("side", "low", "high"), [(256, 256, 304), (255, 215, 256), (16, 16, 19)])
def test_a_side_is_counted_in_its_bin(side: int, low: int, high: int):
    at = counted((side, 5000)).sides.index(1)
    assert (SIDES[at - 1], SIDES[at]) == (low, high)


@pytest.mark.parametrize("ratio", [1, 4 / 3, 3 / 2, 16 / 9, 3 / 4, 2])
def test_usual_shapes_lie_well_inside_their_bins(ratio: float):
    assert np.abs(np.log2(ASPECTS) - np.log2(ratio)).min() > 0.01


def test_formats_are_told_from_bytes():
    kinds = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
    assert [image_format(encode(picture(1), k)) for k in kinds] == kinds


def test_fitted_keeps_the_shape_and_a_pixel():
    assert fit_within(100, 200, 50) == (25, 50)
    assert fit_within(333, 500, 100) == (67, 100)
    assert fit_within(1000, 1, 10) == (10, 1)


def test_stats_of_a_prepared_set(tmp_path: Path):
    fill(tmp_path / "in", [f"{c}/{i}.jpg" for c in "ab" for i in range(5)])
    done = run_prepare("folder", tmp_path / "in", tmp_path / "out")
    found, images = describe(str(tmp_path / "out"), tmp_path)
    assert found == done
    assert len(images) == 10
    text = "\n".join(card.lines(found))
    assert "10 images of 2 classes" in text
    assert "folder, 10 listed" in text
    assert "JPEG 100 %" in text
    assert "in bins from" in text, "a card has only bins"


def test_stats_without_a_card_tell_what_the_index_and_a_sample_tell(tmp_path: Path):
    write_shards(tmp_path / "in", 40, 3, broken=[7, 9])
    found, images = describe(str(tmp_path / "in"), tmp_path)
    assert (found["images"], found["classes"], found["shards"], found["sampled"]) == (40, 10, 3, 38)
    assert sum(d["count"] for d in found["dropped"].values()) == 2
    lines = list(card.lines(found))
    assert "no dataset.json; the lines below describe 38 images drawn at random" in lines
    low, middle, high = np.quantile([min(image.shape[:2]) for image in images], [0.05, 0.5, 0.95])
    assert (
        f"sides    shorter side {low:.4g} to {high:.4g} (5th to 95th percentile), median {middle:.4g} pixels" in lines
    )
    _, again = describe(str(tmp_path / "in" / "x-*.tar"), tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(images, again, strict=True))


def test_where_nothing_can_be_shown_one_line_says_so(tmp_path: Path):
    write_shards(tmp_path / "in", 3, 1, broken=[0, 1, 2])
    with pytest.raises(UserError, match="none of 3 images can be decoded"):
        describe(str(tmp_path / "in"), tmp_path)
    (tmp_path / "in" / card.NAME).write_text("{}")
    with pytest.raises(UserError, match=r"dataset.json: not a dataset.json written by eagleray"):
        describe(str(tmp_path / "in"), tmp_path)


@pytest.mark.parametrize("shape", [(2, 400), (400, 2)])
def test_very_long_images_are_drawn(shape: tuple[int, int]):
    image = np.zeros((*shape, 3), np.uint8)
    drawn = np.asarray(contact_sheet.sheet([image]))
    assert (drawn == 0).all(2).sum() == contact_sheet.TILE
    places = np.array([0.0, 1.0])
    assert map_uri(places, places, np.array([0, 1]), [(0, image)]).startswith("data:image/png")


def test_pictures(tmp_path: Path):
    images = [read_pixels(encode(picture(i, 40 + i, 60))) for i in range(11)]
    contact_sheet.sheet(images).save(tmp_path / "contact.png")
    with Image.open(tmp_path / "contact.png") as image:
        assert image.size == (8 * 150 + 6, 2 * 150 + 6)
        drawn = np.asarray(image)
    assert (drawn[:, :6] == contact_sheet.PAPER).all()
    assert (drawn[-70:, 3 * 150 + 6 :] == contact_sheet.PAPER).all(), "eleven images"
    stats = counted((240, 320), (240, 320), (1, 9000))
    for name in ("one", "two"):
        contact_sheet.sizes(stats, tmp_path / f"{name}.png")
    with Image.open(tmp_path / "one.png") as image:
        assert image.width > image.height > 300
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_the_command_prints_and_draws(tmp_path: Path):
    fill(tmp_path / "in", [f"{c}/{i}.jpg" for c in "ab" for i in range(5)])
    words = ["prepare", "folder", str(tmp_path / "in"), str(tmp_path / "out"), "--workers", "0"]
    done = CliRunner().invoke(main.app, words)
    assert done.exit_code == 0, done.output
    words = ["data", "stats", str(tmp_path / "out"), "--out", str(tmp_path / "pictures")]
    done = CliRunner().invoke(main.app, words)
    assert done.exit_code == 0, done.output
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {"contact.png", "sizes.png"}
    assert done.output.startswith(f"pictures come into {tmp_path / 'pictures'}; ")
    assert CliRunner().invoke(main.app, words).exit_code == 0, "the same set is drawn again"


def test_pictures_of_another_set_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for name in ("a/photos", "b/photos"):
        fill(tmp_path / name, [f"{i}.jpg" for i in range(3)])
        assert CliRunner().invoke(main.app, ["data", "stats", name]).exit_code == 0
    assert len(places := list((tmp_path / "stats").iterdir())) == 2
    assert all(place.name.startswith("photos-") for place in places)
    assert CliRunner().invoke(main.app, ["data", "stats", "a/photos", "--out", "mine"]).exit_code == 0
    before = (tmp_path / "mine" / "contact.png").read_bytes()
    line = refused(capsys, "data", "stats", "b/photos", "--out", "mine")
    assert f"--out mine: holds pictures of {tmp_path / 'a/photos'}; give another --out" in line
    monkeypatch.chdir(tmp_path / "a")
    for given in ((".",), ("photos", "--out", "photos/new")):
        assert "whose images its pictures would join; give another" in refused(capsys, "data", "stats", *given)
    assert (tmp_path / "mine" / "contact.png").read_bytes() == before


def test_spoiled_images_are_no_census():
    with pytest.raises(OSError, match="cannot identify"):
        image_format(spoiled(1))


def test_a_jpeg_that_only_decoders_open_is_counted(tmp_path: Path):
    data = jpeg(1)
    assert data[2:11] == b"\xff\xe0\0\x10JFIF\0"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(data[:2] + b"\xff\xe0\0\7JFIF\0" + data[20:])
    assert run_prepare("folder", tmp_path / "in", tmp_path / "out")["formats"] == {"JPEG": 1}
