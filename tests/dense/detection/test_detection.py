"""Detection: the pyramid, both kinds of heads, COCO's files and scores, and the whole protocol on drawn pictures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.layers import DropPath
from torchvision.ops import box_iou

from eagleray.base.errors import UserError
from eagleray.dense.catalogue import Detection
from eagleray.dense.detection import coco_values
from eagleray.dense.detection import data as data
from eagleray.dense.detection import detection as protocol
from eagleray.dense.detection import heads as heads
from eagleray.dense.detection import scores as scoring
from eagleray.dense.detection import train as training
from eagleray.dense.detection.pyramid import FeaturePyramid
from eagleray.models.backbone import Backbone
from eagleray.protocols import fine_tuning
from eagleray.protocols.protocol import Workspace

VIT = {"embed_dim": 24, "depth": 4, "num_heads": 3}
SWIN = {"embed_dim": 24, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 3, 6]}
SMALL = {"drop_path": 0.0, "sizes": [64], "longest": 64, "channels": 16, "regions": 16, "anchor": 4, "batch": 2}


def vit(**options: Any) -> Backbone:
    return Backbone("vit_tiny_patch16_224", options={**VIT, **options})


def resnet() -> Backbone:
    return Backbone("test_resnet")


BACKBONES = {
    "vit": (vit, 4),
    "vit, patches of 8": (lambda: vit(patch_size=8), 2),
    "vit, patches of 32": (lambda: vit(patch_size=32), 8),
    "swin": (lambda: Backbone("swin_tiny_patch4_window7_224", options=SWIN), 4),
    "resnet": (resnet, 4),
}


@pytest.mark.parametrize("kind", BACKBONES)
def test_five_maps_each_half_as_fine_as_the_one_before(kind: str):
    make, finest = BACKBONES[kind]
    torch.manual_seed(0)
    pyramid = FeaturePyramid(make(), channels=8)
    assert pyramid.strides == [finest * 2**i for i in range(5)]
    maps = pyramid(torch.randn(2, 3, 128, 192))
    assert list(maps) == [*pyramid.names, "pool"]
    for x, stride in zip(maps.values(), pyramid.strides, strict=True):
        assert x.shape == (2, 8, -(-128 // stride), -(-192 // stride))


def test_a_vit_of_twelve_blocks_is_read_after_blocks_4_6_8_and_12():
    assert FeaturePyramid(vit(depth=12), channels=8).maps.taps == [3, 5, 7, 11]


def test_every_map_depends_on_the_whole_backbone():
    pyramid = FeaturePyramid(vit(), channels=8)
    sum(x.square().mean() for x in pyramid(torch.randn(1, 3, 64, 64)).values()).backward()
    assert all(p.grad is not None for p in pyramid.maps.backbone.model.blocks.parameters())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: vit(patch_size=14), "powers of two"),
        (lambda: Backbone("mixer_s32_224"), "MlpMixer has no grid of patches"),
    ],
)
def test_a_backbone_that_has_no_such_grids_is_refused(make: Callable[[], Backbone], said: str):
    with pytest.raises(UserError, match=said):
        FeaturePyramid(make())


def detector(*, cascade: bool, classes: int = 3) -> Any:
    torch.manual_seed(0)
    pyramid = FeaturePyramid(resnet(), channels=16)
    return heads.mask_rcnn(pyramid, classes, cascade=cascade, sizes=(64,), longest=96, anchor=4, regions=16)


def test_nothing_is_dropped_unless_the_schedule_says_so():
    """Whatever the pretraining has dropped of the network that it exports."""
    backbone = Backbone("vit_tiny_patch16_224", drop_path=0.5, options={**VIT, "patch_drop_rate": 0.5})
    net = protocol.build(backbone, 2, training.DetectionSchedule(drop_path=0.0, channels=8))
    assert not any(isinstance(m, DropPath) for m in net.modules())
    assert backbone.model.patch_drop.prob == 0


@pytest.mark.parametrize("cascade", [False, True])
def test_losses_reach_every_parameter_and_detections_lie_in_the_image(cascade: bool):
    net = detector(cascade=cascade)
    masks = torch.zeros(2, 64, 96, dtype=torch.uint8)
    masks[0, 8:40, 8:40], masks[1, 20:60, 50:90] = 1, 1
    boxes = torch.tensor([[8.0, 8, 40, 40], [50, 20, 90, 60]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks}
    images = [torch.rand(3, 64, 96), torch.rand(3, 64, 96)]
    sum(net(images, [target, target]).values()).backward()
    unused = [n for n, p in net.named_parameters() if p.grad is None]
    assert unused == []
    for found in net.eval()(images):
        assert found["masks"].shape == (len(found["boxes"]), 1, 64, 96)
        assert (found["boxes"] >= 0).all()
        assert (found["boxes"][:, [0, 2]] <= 96).all()
        assert (found["boxes"][:, [1, 3]] <= 64).all()
        assert set(found["labels"].tolist()) <= {1, 2}


def test_each_stage_of_a_cascade_brings_boxes_nearer():
    """With offsets that go half of the way, as a head that has learnt something gives them."""
    stages = detector(cascade=True).roi_heads.stages
    truth = torch.tensor([[10.0, 12, 40, 50], [60, 20, 90, 44]])
    boxes = [truth + torch.tensor([[6.0, -5, 9, 4], [-7, 6, 2, 12]])]
    overlaps = [box_iou(boxes[0], truth).diag()]
    for stage in stages:
        offsets = stage.box_coder.encode([truth], boxes)[0] / 2
        boxes = heads.refine(stage, offsets.repeat(1, 3), boxes, [(64, 96)])
        overlaps.append(box_iou(boxes[0], truth).diag())
    assert (torch.stack(overlaps).diff(dim=0) > 0.02).all()
    assert [s.proposal_matcher.high_threshold for s in stages] == [0.5, 0.6, 0.7]


def test_a_cascade_moves_the_boxes_of_one_stage_on_in_the_next():
    """Heads that know the truth give it after the first stage, and stay there."""
    stages = detector(cascade=True, classes=2).roi_heads.eval()
    truth, seen = torch.tensor([[10.0, 12, 40, 50]]), list[torch.Tensor]()

    class Knows(torch.nn.Module):
        def __init__(self, stage: Any) -> None:
            super().__init__()
            self.coder = stage.box_coder

        def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([[0.0, 9.0]]), self.coder.encode([truth], [seen[-1]])[0].repeat(1, 2)

    for stage in stages.stages:
        stage.box_predictor = Knows(stage)
        stage.box_roi_pool.register_forward_pre_hook(lambda _, args: seen.append(args[1][0]))
    features = {name: torch.rand(1, 16, 16 // 2**i, 24 // 2**i) for i, name in enumerate("0123")}
    with torch.no_grad():
        [found], _ = stages(features, [truth + 5], [(64, 96)])
    torch.testing.assert_close(torch.cat(seen), torch.cat([truth + 5, truth, truth]), atol=1e-3, rtol=0)
    torch.testing.assert_close(found["boxes"], truth, atol=1e-3, rtol=0)


def test_masks_survive_both_ways_of_writing_them():
    generator = np.random.default_rng(0)
    for mask in (generator.integers(0, 2, (13, 7), np.uint8), np.zeros((5, 9), np.uint8), np.ones((4, 6), np.uint8)):
        runs = scoring.to_runs(mask)
        np.testing.assert_array_equal(scoring.to_mask(runs, *mask.shape), mask)
        flat = mask.T.reshape(-1)  # column by column, zeros first
        ends = np.flatnonzero(np.diff(flat)) + 1
        counts = np.diff([0, *ends, len(flat)]).tolist()
        counts = counts if flat[0] == 0 else [0, *counts]
        plain = {"size": list(mask.shape), "counts": counts}
        np.testing.assert_array_equal(scoring.to_mask(plain, *mask.shape), mask)


def test_polygons_become_pixels():
    square = [[2, 3, 8, 3, 8, 7, 2, 7]]
    expected = np.zeros((10, 12), np.uint8)
    expected[3:7, 2:8] = 1
    np.testing.assert_array_equal(scoring.to_mask(square, 10, 12), expected)
    assert scoring.area(square, 10, 12) == 24


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Six images, three of each split, with a bright square or a dark one on grey; categories 3 and 70; image ids from
    10 on. The last has a crowd besides."""
    folder = tmp_path / "coco"
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    for split, first in (("train", 10), ("val", 13)):
        images, annotations = [], []
        for i in range(first, first + 3):
            pixels = np.full((48, 64, 3), 128, np.uint8)
            x, y, side = 4 + i, 30 - i, 16 + i
            pixels[y : y + side, x : x + side] = 255 if i % 2 else 0
            Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
            images.append({"id": i, "file_name": f"{i}.png", "height": 48, "width": 64})
            square = [[x, y, x + side, y, x + side, y + side, x, y + side]]
            annotations.append(
                {"id": i, "image_id": i, "category_id": 70 if i % 2 else 3, "bbox": [x, y, side, side]}
                | {"segmentation": square, "area": side * side, "iscrowd": 0}
            )
        annotations.append({**annotations[-1], "id": 99, "bbox": [0, 0, 10, 10], "iscrowd": 1})
        categories = [{"id": 70, "name": "bright"}, {"id": 3, "name": "dark"}]
        tree = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(tree))
    return folder


def perfect(split: data.Coco) -> list[dict[str, Any]]:
    return [
        {"image_id": split.tree["images"][i]["id"], "category_id": a["category_id"], "score": 0.9, "bbox": a["bbox"]}
        | {"segmentation": scoring.to_runs(scoring.to_mask(a["segmentation"], 48, 64))}
        for i in range(len(split))
        for a, _ in split.trainable_objects(i)
    ]


def test_what_is_all_found_scores_100_and_what_is_not_scores_0(coco: Path):
    split = data.Coco.of(coco, "val")
    right = scoring.scores(split.tree, perfect(split))
    assert right["detection/box_ap"] == right["detection/mask_ap"] == pytest.approx(100)
    nothing = scoring.scores(split.tree, [])
    assert nothing["detection/box_ap"] == nothing["detection/mask_ap"] == 0
    assert "detection/box_ap_large" not in right, "there is none"
    swapped = [{**f, "category_id": 73 - f["category_id"]} for f in perfect(split)]
    assert scoring.scores(split.tree, swapped)["detection/box_ap"] == 0


def test_boxes_that_are_a_little_off_score_less_at_a_high_overlap(coco: Path):
    split = data.Coco.of(coco, "val")
    off = [{**f, "bbox": [f["bbox"][0] + 4, *f["bbox"][1:]]} for f in perfect(split)]
    numbers = scoring.scores(split.tree, off)
    assert numbers["detection/box_ap50"] == pytest.approx(100)
    assert 0 < numbers["detection/box_ap"] < 90
    assert numbers["detection/mask_ap"] == pytest.approx(100)


def test_classes_count_from_1_whatever_their_ids(coco: Path):
    split = data.Coco.of(coco, "train")
    assert list(split.categories) == [3, 70]
    assert [split[i].target["labels"].tolist() for i in range(3)] == [[1], [2], [1]]


def test_ids_of_images_may_be_texts(coco: Path):
    file = coco / "annotations" / "instances_val.json"
    tree = json.loads(file.read_text())
    for rows, key in ((tree["images"], "id"), (tree["annotations"], "image_id")):
        for row in rows:
            row[key] = f"frame {row[key]}"
    file.write_text(json.dumps(tree))
    split = data.Coco.of(coco, "val")
    right = scoring.scores(split.tree, perfect(split))
    assert right["detection/box_ap"] == right["detection/mask_ap"] == pytest.approx(100)


def test_what_is_predicted_in_our_terms_is_found_in_cocos(coco: Path):
    split = data.Coco.of(coco, "val")
    found = []
    for i in range(len(split)):
        target = split[i].target
        found += protocol.coco_results(
            split, i, {**target, "scores": torch.ones(1), "masks": target["masks"].unsqueeze(1)}
        )
    assert scoring.scores(split.tree, found)["detection/mask_ap"] == pytest.approx(100)


def test_boxes_and_masks_are_mirrored_with_the_image(coco: Path):
    split = data.Coco.of(coco, "train")
    image, target = split[0]
    turned = data.mirror(image, target)
    for x, t in ((image, target), (turned.image, turned.target)):
        x0, y0, x1, y1 = t["boxes"][0].int().tolist()
        assert t["masks"][0, y0:y1, x0:x1].all()
        assert t["masks"][0].sum() == (y1 - y0) * (x1 - x0)
        assert (x[0] == 0).equal(t["masks"][0].bool())
    again = data.mirror(*turned)
    assert again.image.equal(image)
    assert again.target["boxes"].equal(target["boxes"])


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "annotations" / "instances_train.json"
        tree = json.loads(file.read_text())
        change(tree)
        file.write_text(json.dumps(tree))

    return apply


WRONG = {
    "no file": (lambda f: (f / "annotations" / "instances_train.json").unlink(), "neither annotations/instances_train"),
    "no JSON": (lambda f: (f / "annotations" / "instances_train.json").write_text("{"), "cannot be read as JSON"),
    "a list": (lambda f: (f / "annotations" / "instances_train.json").write_text("[]"), "has no list `images`"),
    "no image": (lambda f: (f / "images" / "11.png").unlink(), "11.png: no such image; 1 of the 3"),
    "no key": (broken(lambda t: t["annotations"][1].pop("bbox")), r"annotations\[1\] has no bbox"),
    "no mask": (broken(lambda t: t["annotations"][1].pop("segmentation")), r"\[1\] has no segmentation"),
    "empty mask": (broken(lambda t: t["annotations"][0].update(segmentation=[])), "neither polygons nor"),
    "short runs": (
        broken(lambda t: t["annotations"][0].update(segmentation={"size": [48, 64], "counts": [3]})),
        "neither polygons nor",
    ),
    "a box of three": (broken(lambda t: t["annotations"][0].update(bbox=[1, 2, 3])), "expected .x, y, width, height"),
    "a category": (broken(lambda t: t["annotations"][0].update(category_id=4)), "category 4, which is not among"),
    "an image": (broken(lambda t: t["annotations"][0].update(image_id=4)), "image 4, which is not among"),
    "no object": (broken(lambda t: t.update(annotations=[])), "has no objects"),
    "crowds only": (broken(lambda t: [a.update(iscrowd=1) for a in t["annotations"]]), "has no objects"),
    "a path out": (
        broken(lambda t: t["images"][0].update(file_name="../../x.png")),
        "expected a path within the folder",
    ),
    "an absolute path": (broken(lambda t: t["images"][0].update(file_name="/etc/x.png")), "expected a path within"),
    "a long name": (broken(lambda t: t["images"][0].update(file_name="a" * 5000)), "a{100}: no such image; 1 of the 3"),
    "a number as name": (broken(lambda t: t["images"][0].update(file_name=7)), r"images\[0\].file_name is 7"),
    "an id of null": (broken(lambda t: t["images"][0].update(id=None)), r"images\[0\].id is None"),
    "an id that is a list": (broken(lambda t: t["images"][0].update(id=[1])), r"images\[0\].id is \[1\]"),
    "an image that is a list": (broken(lambda t: t["annotations"][0].update(image_id=[1])), "neither a number nor"),
    "a height as text": (broken(lambda t: t["images"][0].update(height="48")), r"images\[0\].height is '48'"),
    "a crowd of 7": (broken(lambda t: t["annotations"][0].update(iscrowd=7)), "iscrowd is 7"),
    "a box without end": (broken(lambda t: t["annotations"][0].update(bbox=[0, 0, float("inf"), 1])), "expected .x, y"),
    "long runs": (
        broken(lambda t: t["annotations"][0].update(segmentation={"size": [48, 64], "counts": "PPYo0" * 9})),
        "neither polygons nor",
    ),
    "no runs": (
        broken(lambda t: t["annotations"][0].update(segmentation={"size": [48, 64], "counts": "\u20ac"})),
        "neither polygons nor",
    ),
    "a polygon far away": (
        broken(lambda t: t["annotations"][0].update(segmentation=[[0, 0, 2**31, 0, 2**31, 2**31]])),
        "neither polygons nor",
    ),
    "a polygon without end": (
        broken(lambda t: t["annotations"][0].update(segmentation=[[0, 0, 48, 60] * 10_000])),
        "neither polygons nor",
    ),
    "an image of 4 GB": (
        broken(lambda t: t["images"][0].update(height=65_536, width=65_536)),
        "65536 x 65536 pixels, expected at most 178956970",
    ),
    "deep": (
        lambda f: (f / "annotations" / "instances_train.json").write_text("[" * 200_000),
        "cannot be read as JSON",
    ),
    "twins": (broken(lambda t: t["images"].append(t["images"][0])), "two images have the same id"),
}


def test_compressed_runs_are_those_of_cocos_own_code():
    from faster_coco_eval import mask as coco_masks

    generator = np.random.default_rng(0)
    for height, width in ((1, 1), (48, 64), (300, 7)):
        mask = (generator.random((height, width)) < 0.2).astype(np.uint8)
        mask[height // 2 :] = 1
        text = coco_masks.encode(np.asfortranarray(mask))["counts"]
        runs = coco_values.run_lengths(text.decode() if isinstance(text, bytes) else text)
        again = np.repeat(np.arange(len(runs)) % 2, runs).reshape(width, height).T
        assert (again == mask).all()
        assert coco_values.is_mask({"size": [height, width], "counts": text.decode()}, [height, width])


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_set_is_one_clear_line(kind: str, coco: Path):
    spoil, said = WRONG[kind]
    spoil(coco)
    with pytest.raises(UserError, match=said) as caught:
        data.Coco.of(coco, "train")
    assert "\n" not in str(caught.value)


def test_an_image_that_is_broken_or_of_another_size_is_named(coco: Path):
    split = data.Coco.of(coco, "train")
    Image.new("RGB", (10, 10)).save(coco / "images" / "10.png")
    with pytest.raises(UserError, match="has 10 x 10 pixels"):
        split[0]
    (coco / "images" / "10.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"10.png: cannot be read: cannot identify image file"):
        split[0]


def test_cocos_own_folders_are_found(coco: Path):
    (coco / "images").rename(coco / "train2017")
    file = coco / "annotations" / "instances_train.json"
    file.rename(file.with_stem("instances_train2017"))
    assert len(data.Coco.of(coco, "train")) == 3


def test_schedules_are_the_papers():
    once, thrice, both = (training.load_schedule(name) for name in ("1x", "3x", "3x_cascade"))
    assert (once.epochs, once.lr.drops, once.sizes) == (12, (8, 11), (800,))
    assert (thrice.epochs, thrice.lr.drops, thrice.sizes[::5]) == (36, (27, 33), (480, 640, 800))
    assert (once.lr.value, once.weight_decay, once.batch) == (1e-4, 0.05, 16)
    assert both.cascade
    assert both.epochs == 36
    with pytest.raises(UserError, match="no such detection schedule"):
        training.load_schedule("2x")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps({**SMALL, "epochs": 3, "lr": {"value": 1e-3}}))
    return str(path)


def test_order_does_not_depend_on_where_it_begins(coco: Path, tiny: str):
    split, how = data.Coco.of(coco, "train"), training.load_schedule(tiny)
    places = [0, 1, 2] * 2
    whole = [[e.image for e in b.examples] for _, b in training.batches(split, places, how, (2,), 0)]
    late = [[e.image for e in b.examples] for _, b in training.batches(split, places, how, (2,), 4)]
    assert len(whole) == 9
    assert all(torch.equal(x, y) for a, b in zip(whole[4:], late, strict=True) for x, y in zip(a, b, strict=True))


def test_the_protocol_trains_a_copy_and_does_not_train_twice(coco: Path, tiny: str, tmp_path: Path):
    backbone, said = resnet(), list[str]()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    first = protocol.detection(backbone, coco, Detection(schedule=tiny), Workspace(tmp_path, said.append))
    assert all(v.equal(before[k]) for k, v in backbone.state_dict().items())
    assert any("step 3/3" in line and "ETA" in line for line in said)
    assert {"detection/box_ap", "detection/mask_ap", "detection/box_ap50"} <= first.numbers.keys()
    assert first.settings["epochs"] == 3
    assert all(p.is_file() for p in first.pictures)
    said.clear()
    again = protocol.detection(backbone, coco, Detection(schedule=tiny), Workspace(tmp_path, said.append))
    assert again.numbers == first.numbers
    assert "continues after step 3 of 3" in said[1]
    assert not any("ETA" in line for line in said)


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not(
    coco: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fine_tuning, "SAVE_SECONDS", 0.0)
    split, how = data.Coco.of(coco, "train"), training.load_schedule(tiny)

    def train(folder: str, note: Callable[[str], None]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        net = protocol.build(resnet(), 2, how)
        training.fit(net, split, how, str(tmp_path / folder), tmp_path / folder, note)
        return net.state_dict()

    def stop(line: str) -> None:
        if "step 2/3" in line:
            raise KeyboardInterrupt

    whole = train("whole", print)
    with pytest.raises(KeyboardInterrupt):
        train("part", stop)
    assert [p.stem for p in (tmp_path / "part").glob("*.pt")] == ["step-000000001"]
    assert all(v.equal(whole[k]) for k, v in train("part", print).items())


def test_other_categories_in_val_are_refused(coco: Path, tiny: str, tmp_path: Path):
    file = coco / "annotations" / "instances_val.json"
    file.write_text(file.read_text().replace('"bright"', '"white"'))
    with pytest.raises(UserError, match="its categories differ from those of"):
        protocol.detection(resnet(), coco, Detection(schedule=tiny), Workspace(tmp_path, print))


def test_a_validation_image_of_another_size_is_known_before_the_training(coco: Path, tiny: str, tmp_path: Path):
    file = coco / "annotations" / "instances_val.json"
    tree = json.loads(file.read_text())
    tree["images"][-1]["width"] += 1
    file.write_text(json.dumps(tree))
    notes: list[str] = []
    with pytest.raises(UserError, match=r"pixels; .*instances_val.json says"):
        protocol.detection(resnet(), coco, Detection(schedule=tiny), Workspace(tmp_path / "out", notes.append))
    assert not any("step" in note for note in notes)


@pytest.mark.slow
def test_squares_are_learnt_by_heart(coco: Path, tmp_path: Path):
    """Trained on what it is judged on, boxes and masks are found nearly where they are."""
    train = coco / "annotations" / "instances_train.json"
    (coco / "annotations" / "instances_val.json").write_text(train.read_text())
    path = tmp_path / "long.yaml"
    path.write_text(json.dumps({**SMALL, "epochs": 150, "channels": 32, "lr": {"value": 2e-3, "warmup": 5, "end": 0}}))
    outcome = protocol.detection(resnet(), coco, Detection(schedule=str(path)), Workspace(tmp_path, print))
    assert outcome.numbers["detection/box_ap"] > 50
    assert outcome.numbers["detection/mask_ap"] > 50
