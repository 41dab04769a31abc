"""Attention and components over the frames of a video."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.golden_cases import vit
from PIL import Image

from eagleray.base.errors import UserError
from eagleray.dense.catalogue import VideoPicture
from eagleray.dense.video.pictures import described, frame_files, video
from eagleray.models.backbone import Backbone
from eagleray.protocols.protocol import Workspace
from eagleray.protocols.visual import draw
from eagleray.protocols.visual.attention import head_maps, maps
from eagleray.protocols.visual.explore import coloured
from eagleray.views.photometric import normalise


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return vit(32, 8, 12, 2, 3).eval()


def frames(folder: Path, count: int, shift: int = 4) -> Path:
    """Draw a square that moves over a background by `shift` pixels a frame."""
    folder.mkdir()
    still = np.random.default_rng(0).integers(80, size=(48, 96, 3), dtype=np.uint8)
    for i in range(count):
        frame = still.copy()
        frame[16:32, shift * i : shift * i + 16] = 250, 200, 90
        Image.fromarray(frame).save(folder / f"{i:05d}.png")
    return folder


@pytest.mark.parametrize(("count", "limit", "taken"), [(7, 100, [0, 1, 2, 3, 4, 5, 6]), (9, 3, [0, 4, 8]), (5, 1, [0])])
def test_frames_are_spread_evenly_in_the_order_of_their_names(tmp_path: Path, count: int, limit: int, taken: list[int]):
    folder = frames(tmp_path / "clip", count)
    (folder / "notes.txt").write_text("no frame")
    assert [int(p.stem) for p in frame_files(folder, limit)] == taken


@torch.inference_mode()
def test_each_frame_is_described_as_it_would_be_alone(tmp_path: Path, backbone: Backbone):
    paths = frame_files(frames(tmp_path / "clip", 3), 3)
    images, heats, patches, grid = described(backbone, paths, 48)
    assert grid == (6, 8), "48 x 96 pixels, of which the long side becomes a multiple of 64"
    for i, path in enumerate(paths):
        [image], [heat], [alone], _ = described(backbone, [path], 48)
        assert torch.equal(images[i], image)
        torch.testing.assert_close(heats[i], heat)
        torch.testing.assert_close(patches[i], alone)
    assert len({p.numpy().tobytes() for p in patches}) == 3


@torch.inference_mode()
def test_attention_is_the_mean_of_the_heads(tmp_path: Path, backbone: Backbone):
    [image], [heat], _, grid = described(backbone, frame_files(frames(tmp_path / "clip", 2), 2)[:1], 48)
    token = maps(backbone, normalise(image[None], torch.device("cpu")))
    torch.testing.assert_close(heat.flatten(), head_maps(token)[0].mean(0).flatten())
    assert heat.shape == grid
    assert 0 < heat.sum() <= 1


def test_a_colour_means_the_same_in_all_frames(tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch):
    """Frames that come twice have the same colours twice, which they have not if each has a basis of its own."""
    drawn: list[np.ndarray] = []
    whole = draw.colour_overlay
    monkeypatch.setattr(draw, "colour_overlay", lambda x, c: drawn.append(c.numpy()) or whole(x, c))
    folder = frames(tmp_path / "clip", 4)
    for i in range(4):
        (folder / f"{i + 4:05d}.png").hardlink_to(folder / f"{i:05d}.png")
    video(backbone, folder, VideoPicture(size=48), Workspace(tmp_path / "out"))
    np.testing.assert_array_equal(drawn[:4], drawn[4:])
    with torch.inference_mode():
        _, _, patches, grid = described(backbone, frame_files(folder, 8), 48)
    np.testing.assert_array_equal(drawn, coloured(patches, grid)[2])


def test_a_strip_and_an_animation(tmp_path: Path, backbone: Backbone, capsys: pytest.CaptureFixture[str]):
    found = video(
        backbone, frames(tmp_path / "clip", 9), VideoPicture(size=48, limit=8, rate=10), Workspace(tmp_path / "out")
    )
    assert 0 < found.numbers["video/variance"] <= 100
    assert found.settings == {"size": 48, "frames": 8, "grid": "6 x 8", "rate": 10}
    assert [p.name for p in found.pictures] == ["video.png", "video.webp"]
    strip, moving = (Image.open(p) for p in found.pictures)
    assert strip.width > strip.height
    assert (moving.n_frames, moving.size) == (8, (3 * 64, 48)), "frame, attention and components side by side"
    moving.load()
    assert moving.info["duration"] == 100
    assert re.fullmatch(r"video: 8 frames, three components hold \d+\.\d % of .*\n", capsys.readouterr().out)


def test_a_network_without_attention_shows_its_components(tmp_path: Path):
    found = video(
        Backbone("resnet18"), frames(tmp_path / "clip", 2), VideoPicture(size=64), Workspace(tmp_path / "out")
    )
    assert Image.open(found.pictures[1]).size == (2 * 128, 64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", r"--frames .*nowhere: no such folder; expected the frames of a video"),
        ("one", r"--frames .*one: found 1 images \(\.jpg .*\); expected two or more"),
        ("damaged", r"00001\.png: cannot be read"),
        ("sizes", r"00001\.png: differs in size from the first frame, 00000\.png"),
    ],
)
def test_a_wrong_folder_is_named(given: str, message: str, tmp_path: Path, backbone: Backbone):
    folder = tmp_path / given
    if given != "nowhere":
        frames(folder, 1 if given == "one" else 2)
    if given == "damaged":
        (folder / "00001.png").write_bytes((folder / "00001.png").read_bytes()[:90])
    if given == "sizes":
        Image.new("RGB", (48, 48)).save(folder / "00001.png")
    with pytest.raises(UserError, match=message):
        video(backbone, folder, VideoPicture(size=48), Workspace(tmp_path / "out"))
