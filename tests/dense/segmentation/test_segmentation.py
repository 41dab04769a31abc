"""Classes of pixels: what is counted, what is read, what is trained."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, PngImagePlugin
from timm.layers import DropPath

from eagleray.base.errors import UserError
from eagleray.dense.catalogue import Segmentation
from eagleray.dense.feature_maps import Maps
from eagleray.dense.segmentation import data, heads, segmentation
from eagleray.dense.segmentation.data import IGNORED, Masks, crop, crops, resized_shape
from eagleray.dense.segmentation.scores import SCALES, class_scores, confusion, probabilities, scores
from eagleray.dense.segmentation.segmentation import HEADS, Segmenter, poly
from eagleray.models.backbone import Backbone
from eagleray.protocols import fine_tuning
from eagleray.protocols.digests import weights_digest
from eagleray.protocols.fine_tuning import set_drop_path
from eagleray.protocols.protocol import Workspace
from eagleray.views.photometric import normalise_

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3}
SWIN = {"embed_dim": 12, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 3, 6)}


def vit(**more) -> Backbone:
    torch.manual_seed(0)
    return Backbone("vit_tiny_patch16_224", options={**VIT, **more})


# --- counts


def test_scores_are_what_counting_pixel_by_pixel_gives():
    """With pixels that are ignored, a class that is nowhere, one that is only found and one that is only missed."""
    rng, classes = np.random.default_rng(0), 7
    truth, found = rng.choice([0, 1, 2, 5, IGNORED], (40, 50)), rng.choice([0, 1, 2, 3, 6], (40, 50))
    found[truth == IGNORED] = 4
    iou, accuracy, right, total = [], [], 0, 0
    for c in range(classes):
        both = either = mine = 0
        for t, f in zip(truth.flat, found.flat, strict=True):
            if t != IGNORED:
                both += t == c and f == c
                either += t == c or f == c
                mine += t == c
        iou += [both / either] if either else []
        accuracy += [both / mine] if mine else []
        right, total = right + both, total + mine
    counts = confusion(torch.from_numpy(truth), torch.from_numpy(found), classes)
    got = scores(counts)
    assert len(iou) == 6
    assert len(accuracy) == 4
    assert got == pytest.approx(
        {"miou": 100 * np.mean(iou), "macc": 100 * np.mean(accuracy), "aacc": 100 * right / total}
    )
    assert counts[:, 4].sum() == 0
    assert torch.isnan(class_scores(counts)[0]).tolist() == [False] * 4 + [True] + [False] * 2


def test_the_truth_scores_100():
    truth = torch.from_numpy(np.random.default_rng(0).choice([0, 3, IGNORED], (9, 9)))
    assert set(scores(confusion(truth, truth, 5)).values()) == {100.0}


# --- whole images


def pixelwise(x: torch.Tensor) -> torch.Tensor:
    """A net that looks at one pixel at a time."""
    return torch.cat([x, -x], 1)


def test_at_one_scale_without_mirror_images_the_mean_is_the_net_itself():
    image = torch.randint(0, 256, (3, 24, 40), dtype=torch.uint8)
    expected = pixelwise(normalise_(image[None].float() / 255)).softmax(1)[0]
    torch.testing.assert_close(probabilities(pixelwise, image, size=24), expected)
    torch.testing.assert_close(probabilities(pixelwise, image, size=24, mirror=True), expected)


def test_the_mean_over_sizes_is_one_of_distributions_and_is_mirrored_with_the_image():
    image = torch.randint(0, 256, (3, 24, 40), dtype=torch.uint8)
    weight = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    seen = []

    def net(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[2:])
        return F.conv2d(x, weight, padding=2)

    mean = probabilities(net, image, size=24, scales=SCALES, mirror=True)
    torch.testing.assert_close(mean.sum(0), torch.ones(24, 40))
    assert seen[::2] == [(12, 20), (18, 30), (24, 40), (30, 50), (36, 60), (42, 70)]
    torch.testing.assert_close(probabilities(net, image.flip(-1), size=24, scales=SCALES, mirror=True), mean.flip(-1))
    assert not torch.allclose(probabilities(net, image, size=24), mean, atol=1e-3)


def test_the_long_side_has_a_limit():
    assert resized_shape(torch.empty(3, 100, 200), 50) == (50, 100)
    assert resized_shape(torch.empty(100, 1000), 50) == (20, 200)
    assert resized_shape(torch.empty(100, 200), 50, 1.5) == (75, 150)


# --- heads


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("vit_tiny_patch16_224", VIT), ("swin_tiny_patch4_window7_224", SWIN), ("resnet18", {})],
)
def test_scores_are_as_large_as_the_image(name: str, options: dict, head: str):
    net = Segmenter(Backbone(name, options=options), HEADS[head], 5, 32).eval()
    with torch.no_grad():
        for h, w in (64, 64), (50, 75):
            assert net.scores(torch.randn(2, 3, h, w)).shape == (2, 5, h, w)
    assert len(net.train().raw(torch.randn(2, 3, 64, 64))) == (2 if head == "upernet" else 1)


def test_maps_are_fine_to_coarse_and_a_vit_has_them_on_one_grid_unless_rescaled():
    x = torch.randn(2, 3, 64, 64)
    sides = [m.shape[-1] for m in Maps(vit(), (3, 6, 9, 12), rescale=False)(x)]
    assert sides == [8, 8, 8, 8]
    assert [m.shape[-1] for m in Maps(vit(), (4, 6, 8, 12), rescale=True)(x)] == [32, 16, 8, 4]
    maps = Maps(Backbone("resnet18"), (), rescale=True)
    assert [m.shape[1:] for m in maps(x)] == [(d, s, s) for d, s in zip(maps.dims, (16, 8, 4, 2), strict=True)]
    assert Maps(vit(depth=12), (3, 6, 9, 12), rescale=False).taps == [2, 5, 8, 11]  # SelfPatch's


def test_a_level_of_the_fpn_is_doubled_as_often_as_it_is_coarse():
    head = heads.SemanticFPN([8, 8, 8, 8], 3)
    x = torch.zeros(1, 256, 4, 4)
    assert [level(x).shape[-1] for level in head.eval().levels] == [4, 8, 16, 32]


def test_a_backbone_without_maps_is_refused():
    with pytest.raises(UserError, match=r"MlpMixer gives no feature maps|MlpMixer has"):
        Maps(Backbone("mixer_s16_224"), (3, 6, 9, 12), rescale=False)


# --- schedule and depth


def test_the_rate_warms_up_and_falls_to_zero_as_in_mmcv():
    base, steps = 6e-5, 40_000
    for step in (0, 1, 700, 1499, 1500, 1501, 20_000, 39_999):
        regular = base * (1 - step / steps)
        k = (1 - step / 1500) * (1 - 1e-6)
        assert poly(step, steps, base) == pytest.approx(regular * (1 - k) if step < 1500 else regular)
    rates = [poly(s, 100, 1.0) for s in range(101)]
    assert max(rates) == rates[10] == 0.9
    assert (np.diff(rates[:11]) > 0).all()
    assert (np.diff(rates[10:]) < 0).all()
    assert rates[100] == 0
    assert poly(0, 1, 1.0) == 1


def test_stochastic_depth_rises_evenly_whatever_it_was_before():
    for model in (vit().model, Backbone("vit_tiny_patch16_224", options=VIT, drop_path=0.5).model):
        assert set_drop_path(model, 0.3) == 0.3
        rates = [getattr(b.drop_path1, "drop_prob", 0.0) for b in model.blocks]
        assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
        assert set_drop_path(model, 0.0) == 0
        assert not any(isinstance(m, DropPath) for m in model.modules())
    assert set_drop_path(torch.nn.Linear(2, 2), 0.3) == 0


# --- data


def write(folder: Path, name: str, image: np.ndarray, mask: np.ndarray, to: tuple[str, str]) -> None:
    for part, array in zip(to, (image, mask), strict=True):
        (folder / part).mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(folder / part / f"{name}.png")


def squares(folder: Path, train: tuple[str, str], val: tuple[str, str], *, n: int = 2, first: int = 0) -> Path:
    """A square of class 1 on class 0, and a border of no class: the colour tells."""
    for split in train, val:
        for i in range(n):
            mask = np.zeros((40, 56), np.uint8)
            mask[6 + 4 * i : 26 + 4 * i, 8 : 30 + 5 * i] = 1
            image = np.stack([40 + 160 * mask, 200 - 150 * mask, 90 + 0 * mask], -1).astype(np.uint8)
            mask += first
            mask[:2] = IGNORED
            write(folder, f"s{i}", image, mask, split)
    return folder


PLAIN = ("images/train", "masks/train"), ("images/val", "masks/val")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return squares(tmp_path / "set", *PLAIN)


def test_three_layouts_are_read(tmp_path: Path, plain: Path):
    assert Masks.of(plain).classes == ("0", "1")
    camvid = squares(tmp_path / "camvid", ("train", "trainannot"), ("val", "valannot"))
    (camvid / "classes.txt").write_text("Unlabelled\nSquare\nNothing\n")
    masks = Masks.of(camvid)
    assert masks.classes == ("Square", "Nothing")
    assert masks.read(masks.val[0])[1].unique().tolist() == [0, IGNORED]
    ade = ("images/training", "annotations/training"), ("images/validation", "annotations/validation")
    folder = squares(tmp_path / "ade", *ade)
    masks = Masks.of(folder)
    assert len(masks.classes) == 150
    assert masks.read(masks.train[0])[1].unique().tolist() == [0, IGNORED]  # 0 is ignored, 1 is the first class
    (folder / "objectInfo150.txt").write_text("Idx\tRatio\tName\n1\t0.2\twall\n2\t0.1\tbuilding, edifice\n")
    assert Masks.of(folder).classes == ("wall", "building")


def test_hidden_files_are_no_images(plain: Path):
    for part in ("images", "masks"):
        (plain / part / "train/._s0.png").write_bytes(bytes(163))
    assert [pair.image.name for pair in Masks.of(plain).train] == ["s0.png", "s1.png"]


def test_a_list_of_classes_may_begin_with_a_byte_order_mark(plain: Path):
    (plain / "classes.txt").write_text("void\nsquare\nvélo\n", "utf-8-sig")
    masks = Masks.of(plain)
    assert masks.classes == ("square", "vélo")
    assert masks.read(masks.val[0])[1].unique().tolist() == [0, IGNORED]
    (plain / "classes.txt").write_text("void\nsquare\nvélo\n", "latin-1")
    with pytest.raises(UserError, match=r"classes\.txt: not UTF-8 text"):
        Masks.of(plain)


def spoilt(folder: Path, how: str) -> None:
    image, mask = folder / "images/train/s0.png", folder / "masks/train/s0.png"
    if how == "no mask":
        mask.unlink()
    elif how == "no images":
        for p in image.parent.iterdir():
            p.unlink()
    elif how == "other size":
        Image.new("L", (10, 10)).save(mask)
    elif how == "other value":
        Image.fromarray(np.full((40, 56), 9, np.uint8)).save(mask)
    elif how == "16 bits":
        Image.fromarray(np.full((40, 56), 300, np.uint16)).save(mask)
    elif how == "colours":
        Image.new("RGB", (56, 40)).save(mask)
    elif how == "broken image":
        image.write_bytes(b"x")
    elif how == "broken mask":
        mask.write_bytes(image.read_bytes()[:60])
    elif how == "PostScript":  # Pillow would start Ghostscript for it
        Image.new("L", (56, 40)).save(mask, "EPS")
    elif how == "no layout":
        image.parent.rename(folder / "images/learn")


def read(folder: Path) -> None:
    masks = Masks.of(folder)
    for pair in masks.train:
        masks.read(pair)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no mask", r"s0.png: no mask in .*masks/train has the same name"),
        ("no images", r"images/train: expected images, found none"),
        ("other size", r"masks/train/s0.png: has 10 x 10 pixels, its image has 56 x 40"),
        ("16 bits", r"masks/train/s0.png: has the value 300, which is not the number of any of the 2 classes"),
        ("other value", r"masks/train/s0.png: has the value 9, which is not the number of any of the 2 classes"),
        ("colours", r"masks/train/s0.png: has 3 channels; expected one"),
        ("broken image", r"images/train/s0.png: "),
        ("broken mask", r"masks/train/s0.png: "),
        ("PostScript", r"masks/train/s0.png: cannot identify image file"),
        ("no layout", r"--masks .*expected the folders images/training, annotations/training"),
    ],
)
def test_a_set_that_is_wrong_is_refused_in_one_line(plain: Path, how: str, said: str):
    (plain / "classes.txt").write_text("ground\nsquare\n")
    spoilt(plain, how)
    with pytest.raises(UserError, match=said) as e:
        read(plain)
    assert "\n" not in str(e.value)


def test_a_mask_may_have_a_long_text(plain: Path):
    mask, info = plain / "masks/train/s0.png", PngImagePlugin.PngInfo()
    before = data.read_mask(mask)
    info.add_text("Comment", "x" * 2**21, zip=True)
    Image.fromarray(before.astype(np.uint8)).save(mask, pnginfo=info)
    assert (data.read_mask(mask) == before).all()


def test_a_crop_keeps_image_and_classes_together(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "distort", lambda x, rng: x)
    masks = Masks.of(plain)
    image, truth = masks.read(masks.train[1])
    for seed in range(20):
        x, y = crop(image, truth, np.random.default_rng(seed), size=48)
        assert x.shape == (3, *y.shape) == (3, 48, 48)
        known = y != IGNORED
        assert ((x[0] > x[1])[known] == (y == 1)[known]).float().mean() > 0.97  # but for blurred edges
        assert (y[~x.any(0)] == IGNORED).all()  # what was padded


def test_batches_are_the_same_wherever_one_starts_and_an_epoch_has_every_image(plain: Path):
    masks = Masks.of(plain)
    whole = list(crops(masks, start=0, stop=4, batch=3, rows=range(3), size=16, seed=0))
    late = list(crops(masks, start=2, stop=4, batch=3, rows=range(3), size=16, seed=0))
    for (x, y), (x2, y2) in zip(whole[2:], late, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)
    assert not torch.equal(whole[0][0], whole[1][0])


# --- training


def run(backbone: Backbone, folder: Path, out: Path, **more) -> tuple[dict[str, float], list[str]]:
    notes: list[str] = []
    note = more.pop("note", notes.append)
    given = {"steps": 6, "batch": 2, "size": 32, "lr": 1e-3, "width": 32} | more
    return dict(segmentation.segmentation(backbone, folder, Segmentation(**given), Workspace(out, note)).numbers), notes


def test_two_images_are_learnt_and_the_backbone_is_left_as_it_was(plain: Path, tmp_path: Path):
    backbone = vit()
    before = weights_digest(backbone)
    numbers, notes = run(backbone, plain, tmp_path / "out", steps=60, lr=4e-3)
    assert weights_digest(backbone) == before
    assert numbers["segmentation/miou"] > 80
    assert numbers["segmentation/aacc"] > 90
    assert 3 < len(notes) < 30
    assert (tmp_path / "out" / "segmentation-fpn.png").stat().st_size > 5000
    assert (tmp_path / "out" / "segmentation-fpn.csv").read_text().splitlines()[0] == "class,iou,accuracy,pixels"


def test_upernet_trains_and_is_scored_at_many_sizes(plain: Path, tmp_path: Path):
    numbers, _ = run(vit(), plain, tmp_path / "out", head="upernet", steps=2, multi_scale=True)
    assert set(numbers) == {f"segmentation/{n}{s}" for n in ("miou", "macc", "aacc") for s in ("", "_multi_scale")}


def test_a_training_that_was_stopped_ends_as_one_that_was_not(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fine_tuning, "SAVE_SECONDS", 0.0)
    ended = list(weights(vit(), plain, tmp_path / "whole"))

    def stop(line: str) -> None:
        if "step 3/6" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(vit(), plain, tmp_path / "parts", note=stop)
    [path] = (tmp_path / "parts").glob("segmentation-fpn-*/*.pt")
    assert path.stem == "step-000000002"
    again = list(weights(vit(), plain, tmp_path / "parts"))
    for a, b in zip(ended, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_other_masks_are_learnt_anew(plain: Path, tmp_path: Path):
    numbers, _ = run(vit(), plain, tmp_path / "out")
    again, notes = run(vit(), plain, tmp_path / "out")
    assert again == numbers
    assert "continues after step 6 of 6" in notes[0]
    os.utime(plain / "masks/train/s0.png", (1, 1))  # as if it had been corrected
    _, notes = run(vit(), plain, tmp_path / "out")
    assert not any("continues after step" in line for line in notes)


def test_a_broken_validation_image_is_known_before_the_training(plain: Path, tmp_path: Path):
    (plain / "masks/val/s1.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"masks/val/s1.png: "):
        run(vit(), plain, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def weights(backbone: Backbone, folder: Path, out: Path) -> Iterator[torch.Tensor]:
    """Those at the end of a training."""
    run(backbone, folder, out)
    [path] = out.glob("segmentation-fpn-*/*.pt")
    yield from torch.load(path, weights_only=True)["net"].values()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"head": "deeplab"}, "--head deeplab: expected fpn or upernet"),
        ({"steps": 0}, "--steps 0: expected 1 or more"),
        ({"width": 1}, "--width 1: expected 2 or more"),
        ({"batch": 1}, "--batch 1: expected 2 or more"),
    ],
)
def test_settings_that_are_wrong_are_refused(plain: Path, tmp_path: Path, given: dict, said: str):
    with pytest.raises(UserError, match=said):
        run(vit(), plain, tmp_path / "out", **given)


def test_a_backbone_that_cannot_take_the_images_is_refused(plain: Path, tmp_path: Path):
    torch.manual_seed(0)
    fixed = Backbone("vit_tiny_patch16_224", options={**VIT, "img_size": 224, "dynamic_img_size": False})
    with pytest.raises(
        UserError, match="VisionTransformer cannot take images of 32 x 32 pixels, as --size 32 asks for"
    ):
        run(fixed, plain, tmp_path / "out")
