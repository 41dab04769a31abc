"""Objects followed through videos: measures and propagation against the authors' code, and small videos."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.golden_cases import Case, cases, vit
from PIL import Image
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.dense.catalogue import Davis
from eagleray.dense.video import davis as module
from eagleray.dense.video.davis import (
    colours,
    davis,
    frame_shape,
    min_max,
    neighbourhood,
    propagate,
    tokens,
    videos,
)
from eagleray.dense.video.measures import boundary, contour, region
from eagleray.protocols.protocol import Workspace


@cases("davis_j_f")
def test_measures(case: Case) -> None:
    pairs = [(p.bool().numpy(), g.bool().numpy()) for p, g in zip(case["pred"], case["gt"], strict=True)]
    case.check(torch.tensor([region(*pair) for pair in pairs], dtype=torch.float64), "J")
    tolerance = case.hyper["bound_th"]
    case.check(torch.tensor([boundary(*pair, tolerance) for pair in pairs], dtype=torch.float64), "F")


@cases("davis_label_propagation")
def test_propagation(case: Case) -> None:
    h = case.hyper
    whole = slice(0, h["h"]), slice(0, h["w"])
    reach = h["size_mask_neighborhood"]
    case.check(neighbourhood(whole, whole, reach).float(), "neighbourhood")
    inputs = (case["feat_target"], case["feat_context"], case["seg_context"])
    soft = propagate(*inputs, reach=reach, topk=h["topk"], temperature=h["temperature"])
    case.check(soft, "seg_target")
    case.check(min_max(soft), "seg_target_normalised")


def blob(shift: int = 0, size: int = 40) -> np.ndarray:
    mask = np.zeros((size, size + 10), bool)
    mask[10:25, 8 + shift : 26 + shift] = True
    mask[25:30, 12 + shift : 18 + shift] = True
    return mask


def test_a_mask_is_all_of_itself_and_nothing_of_its_complement():
    empty = np.zeros((40, 50), bool)
    for mask in (blob(), empty, ~empty):
        assert region(mask, mask) == boundary(mask, mask) == 1
    assert region(blob(), ~blob()) == 0
    assert region(blob(), empty) == boundary(blob(), empty) == boundary(empty, blob()) == 0


@pytest.mark.parametrize("tolerance", [0.008, 0.03, 0.06])
@pytest.mark.parametrize("shift", [1, 2, 3, 6])
def test_shifted_masks_against_every_pair_of_pixels(shift: int, tolerance: float):
    one, other = blob(), blob(shift)
    assert region(one, other) == (one & other).sum() / (one | other).sum()
    reach = np.ceil(tolerance * np.hypot(*one.shape))
    a, b = (np.argwhere(contour(m)) for m in (one, other))
    apart = np.linalg.norm(a[:, None] - b[None], axis=-1)
    precision, recall = (apart.min(1) <= reach).mean(), (apart.min(0) <= reach).mean()
    assert boundary(one, other, tolerance) == pytest.approx(2 * precision * recall / (precision + recall))


def test_a_contour_is_where_a_mask_changes():
    mask = np.zeros((4, 5), bool)
    mask[2:, 3:] = True
    expected = np.zeros((4, 5), bool)
    expected[1, 2:] = expected[1:, 2] = True
    assert (contour(mask) == expected).all()  # a mask that leaves the image has no contour there


def alone(*frames: int, patches: int = 12) -> Tensor:
    """Tokens (T, N, D) that are alike nowhere but in equal places of each frame, shifted."""
    return torch.stack([torch.eye(patches).roll(f, 0) for f in frames])


def test_labels_go_where_the_patches_went():
    labels = torch.rand(1, 3, 3, 4, generator=torch.Generator().manual_seed(0))
    target, context = alone(5)[0], alone(0)
    soft = propagate(target, context, labels, reach=0, topk=1)
    torch.testing.assert_close(soft.flatten(1), labels[0].flatten(1).roll(5, 1))


def test_labels_are_means_of_labels():
    draw = torch.Generator().manual_seed(0)
    target, context = torch.randn(12, 8, generator=draw), torch.randn(4, 12, 8, generator=draw)
    labels = torch.randn(4, 3, 12, generator=draw).softmax(1).unflatten(2, (3, 4))
    soft = propagate(target, context, labels, reach=1, topk=5)
    torch.testing.assert_close(soft.sum(0), torch.ones(3, 4))


@pytest.mark.parametrize("reach", [0, 1, 2, 9])
@pytest.mark.parametrize("tile", [1, 2, 3])
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch, tile: int, reach: int):
    draw = torch.Generator().manual_seed(0)
    target, context = torch.randn(35, 8, generator=draw), torch.randn(2, 35, 8, generator=draw)
    arguments = target, context, torch.rand(2, 3, 5, 7, generator=draw)
    whole = propagate(*arguments, reach=reach, topk=5)
    monkeypatch.setattr(module, "TILE", tile)
    torch.testing.assert_close(propagate(*arguments, reach=reach, topk=5), whole)


def test_only_neighbours_count():
    """The likest patch lies two columns away: out of reach 1."""
    labels = torch.zeros(1, 2, 1, 4)
    labels[0, 1, 0, 2] = 1
    target, context = alone(2, patches=4)[0], alone(0, patches=4)
    assert propagate(target, context, labels, reach=0, topk=1)[1, 0].tolist() == [1, 0, 0, 0]
    assert propagate(target, context, labels, reach=1, topk=1)[1, 0, 0] == 0


def test_frames_are_resized_as_the_protocol_says():
    assert frame_shape(480, 854, 480, 16) == (480, 832)
    assert frame_shape(854, 480, 480, 8) == (832, 480)
    assert frame_shape(480, 480, 480, 16) == (480, 480)
    assert frame_shape(480, 854, 480, 14) == (476, 826)


def test_colours_do_not_know_where_in_a_cell_they_are():
    frame = torch.randint(256, (3, 60, 90), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x, grid = colours(frame)
    assert grid == (30, 45)
    torch.testing.assert_close(x.square().sum(1), torch.full((30 * 45,), 4.0))  # of 2 x 2 pixels
    torch.testing.assert_close(colours(frame.unflatten(2, (45, 2)).flip(3).flatten(2))[0], x)
    assert not torch.equal(colours(frame.flip(2))[0], x)


def test_tokens_are_those_before_the_norm():
    torch.manual_seed(0)
    backbone = vit(32, 8, 12, 2, 2).eval()
    frame = torch.randint(256, (3, 32, 64), dtype=torch.uint8)
    x, grid = tokens(backbone, frame, size=32)
    assert (x.shape, grid) == ((4 * 8, 12), (4, 8))
    blocks: list[Tensor] = []
    hook = backbone.model.norm.register_forward_pre_hook(lambda _, args: blocks.append(args[0]))
    tokens(backbone, frame, size=32)
    hook.remove()
    torch.testing.assert_close(x, blocks[0][0, 1:])


SQUARE = 24  # pixels
SETTINGS = {"n_last_frames": 7, "topk": 5, "size_mask_neighborhood": 12}


def davis_folder(root: Path, *, year: str, frames: int = 5, palette: bool = False, two: bool = True) -> Path:
    """A red and a green square on blue that move to the right, with a mask of each frame; 2017's have numbers."""
    (root / "ImageSets" / year).mkdir(parents=True)
    (root / "ImageSets" / year / "val.txt").write_text("squares\n")
    for kind in ("JPEGImages", "Annotations"):
        (root / kind / "480p" / "squares").mkdir(parents=True)
    for i in range(frames):
        mask = np.zeros((96, 128), np.uint8)
        mask[8 : 8 + SQUARE, 8 + 8 * i : 8 + 8 * i + SQUARE] = 1
        if two:
            mask[56 : 56 + SQUARE, 8 + 8 * i : 8 + 8 * i + SQUARE] = 2
        colour = np.array([(20, 40, 200), (220, 30, 30), (30, 200, 40)], np.uint8)[mask]
        Image.fromarray(colour).save(root / "JPEGImages/480p/squares" / f"{i:05d}.jpg", quality=95)
        image = Image.fromarray(mask if palette else (mask > 0).astype(np.uint8) * 255)
        if palette:
            image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
        image.save(root / "Annotations/480p/squares" / f"{i:05d}.png")
    return root


@pytest.mark.parametrize(("year", "palette", "objects"), [("2017", True, 2), ("2017", False, 1), ("480p", True, 1)])
def test_colours_follow_coloured_squares(tmp_path: Path, year: str, palette: bool, objects: int, capsys):
    torch.manual_seed(0)
    root = davis_folder(tmp_path / "davis", year=year, palette=palette)
    found = davis(vit(32, 8, 12, 2, 2), root, Davis(size=64), Workspace(tmp_path / "out"))
    numbers = found.numbers
    assert numbers["davis/colours_J"] > 85
    assert numbers["davis/colours_F"] > 85
    for prefix in ("", "colours_", "squares/", "squares/colours_"):
        both = [numbers[f"davis/{prefix}{n}"] for n in "JF"]
        assert numbers[f"davis/{prefix}J&F"] == pytest.approx(sum(both) / 2)
    assert found.settings["frames"] == 5
    assert [p.name for p in found.pictures] == ["davis-squares.png"]
    assert Image.open(found.pictures[0]).width > 300
    assert "davis squares: J&F" in capsys.readouterr().out
    [video] = videos(root, "val")
    scores, _ = module.evaluate_video(colours, video, **SETTINGS)
    assert scores.shape == (objects, 2)


def test_the_first_and_the_last_frame_do_not_count(tmp_path: Path):
    root = davis_folder(tmp_path, year="2017", palette=True)
    whole, _ = module.evaluate_video(colours, *videos(root, "val"), **SETTINGS)
    for at, counts in ((4, False), (2, True)):
        Image.fromarray(np.zeros((96, 128), np.uint8)).save(root / "Annotations/480p/squares" / f"{at:05d}.png")
        found, _ = module.evaluate_video(colours, *videos(root, "val"), **SETTINGS)
        assert (found < whole).all() if counts else (found == whole).all()


def test_only_the_first_frame_and_the_last_few_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = davis_folder(tmp_path, year="2017", frames=7)
    frames = []
    monkeypatch.setattr(module, "propagate", lambda x, c, *a, **k: frames.append(len(c)) or propagate(x, c, *a, **k))
    module.evaluate_video(colours, *videos(root, "val"), n_last_frames=2, topk=5, size_mask_neighborhood=12)
    assert frames == [1, 2, 3, 3, 3, 3]


def test_a_list_that_names_every_frame(tmp_path: Path):
    root = davis_folder(tmp_path, year="480p")
    lines = [f"/JPEGImages/480p/squares/{i:05d}.jpg /Annotations/480p/squares/{i:05d}.png" for i in range(5)]
    (root / "ImageSets/480p/val.txt").write_text("\n".join(lines) + "\n")
    (root / "JPEGImages/480p/squares/._00001.jpg").write_bytes(bytes(163))  # as macOS leaves it
    assert [(v.name, len(v.frames), v.binary) for v in videos(root, "val")] == [("squares", 5, True)]


def test_what_is_not_there(tmp_path: Path):
    with pytest.raises(UserError, match="no such folder"):
        videos(tmp_path / "none", "val")
    root = davis_folder(tmp_path / "davis", year="2017")
    with pytest.raises(UserError, match=r"no ImageSets/\*/test.txt; its splits are 2017/val"):
        videos(root, "test")
    mask = root / "Annotations/480p/squares/00003.png"
    mask.unlink()
    with pytest.raises(UserError, match=r"00003.png: no such file; 1 of 5 masks are missing"):
        videos(root, "val")
    first = root / "Annotations/480p/squares/00000.png"
    Image.fromarray(np.full((10, 10), 255, np.uint8)).save(mask)
    with pytest.raises(UserError, match="have 10 x 10 and 128 x 96 pixels"):
        module.evaluate_video(colours, *videos(root, "val"), **SETTINGS)
    Image.fromarray(np.zeros((96, 128), np.uint8)).save(first)
    with pytest.raises(UserError, match="the mask of the first frame has no object"):
        module.evaluate_video(colours, *videos(root, "val"), **SETTINGS)
    frame = root / "JPEGImages/480p/squares/00000.jpg"
    frame.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"00000\.jpg: cannot be read"):
        module.read_frame(frame)
    whole = first.read_bytes()
    at = whole.index(b"IDAT")
    first.write_bytes(whole[: at - 4] + (9).to_bytes(4) + whole[at : at + 13] + bytes(100))  # zeros after some pixels
    with pytest.raises(UserError, match=r"00000\.png: cannot be read"):
        module.read_mask(first, binary=False)
    Image.new("L", (128, 96)).save(first, "EPS")  # Pillow would start Ghostscript for it
    with pytest.raises(UserError, match=r"00000\.png: cannot be read: cannot identify image file"):
        module.read_mask(first, binary=False)
    (root / "ImageSets/2017/val.txt").write_text("squares\ncircles\n")
    with pytest.raises(UserError, match="circles: expected three frames or more, found 0"):
        videos(root, "val")
