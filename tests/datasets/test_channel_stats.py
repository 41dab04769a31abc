"""The mean and deviation of every channel, and shards of images of many channels."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.tiffs import BANDS, scene, tiff, write_scenes
from typer.testing import CliRunner

import eagleray
from eagleray.base.errors import UserError
from eagleray.cli import main
from eagleray.datasets.channel_stats import measure_channels


def folder_of(root: Path, count: int) -> Path:
    root.mkdir()
    for n in range(count):
        (root / f"{n:03d}.tif").write_bytes(tiff(scene(n), planar=n % 2 == 1))
    return root


def test_moments_are_those_of_all_values_together(tmp_path: Path):
    folder, scenes = folder_of(tmp_path / "images", 20), [scene(n).reshape(-1, BANDS) for n in range(20)]
    together = np.concatenate(scenes).astype(float)
    measured = measure_channels(str(folder), tmp_path)
    assert measured.images == 20
    np.testing.assert_allclose([c.mean for c in measured.channels], together.mean(0))
    np.testing.assert_allclose([c.std for c in measured.channels], together.std(0))


def test_images_of_other_channels_are_left_out_and_said(tmp_path: Path):
    folder = write_scenes(tmp_path / "shards", 30, broken=2)
    lines = list(measure_channels(str(folder), tmp_path).lines())
    assert lines[0] == "# not measured  2: 4 channels, expected 5"
    assert len(yaml.safe_load("\n".join(lines))["data"]["channels"]) == BANDS


def test_a_channel_of_one_value_has_a_deviation_all_the_same(tmp_path: Path):
    folder = folder_of(tmp_path / "images", 1)
    (folder / "000.tif").write_bytes(tiff(np.full((8, 8, 2), 7, np.uint16)))
    channels = measure_channels(str(folder), tmp_path).channels
    assert [(c.mean, c.std) for c in channels] == [(7, 1)] * 2


def test_a_folder_without_any_readable_image_says_why(tmp_path: Path):
    folder = folder_of(tmp_path / "images", 1)
    (folder / "000.tif").write_bytes(tiff(scene(0), t258=12))
    with pytest.raises(UserError, match="no image can be read: a TIFF with values of 12 bits"):
        measure_channels(str(folder), tmp_path)


def test_shards_of_five_channels_are_prepared_and_measured(tmp_path: Path):
    folder = folder_of(tmp_path / "images", 12)
    (folder / "other.tif").write_bytes(tiff(scene(0)[..., :4]))
    (folder / "broken.tif").write_bytes(b"II*\0" + bytes(40))
    card = eagleray.prepare("folder", folder, tmp_path / "shards", channels=BANDS, workers=0)
    assert card["images"] == 12
    assert card["formats"] == {"TIFF": 12}
    assert card["command"].endswith("--channels 5")
    assert "4 channels, expected 5" in card["dropped"]
    assert eagleray.prepare("folder", folder, tmp_path / "shards", channels=BANDS, workers=0) == card
    with pytest.raises(UserError, match="--channels"):
        eagleray.prepare("folder", folder, tmp_path / "shards", workers=0)
    with pytest.raises(UserError, match="--max-side 20: makes JPEGs, which have no 5 --channels"):
        eagleray.prepare("folder", folder, tmp_path / "more", channels=BANDS, max_side=20, workers=0)


def test_the_card_of_such_shards_is_printed_without_a_contact_sheet(tmp_path: Path):
    eagleray.prepare("folder", folder_of(tmp_path / "images", 12), tmp_path / "shards", channels=BANDS, workers=0)
    words = ["data", "stats", str(tmp_path / "shards"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main.app, words)
    assert "12 images" in done.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sizes.png"]
    done = CliRunner().invoke(main.app, [*words, "--channels"])
    assert len(yaml.safe_load(done.output)["data"]["channels"]) == BANDS
