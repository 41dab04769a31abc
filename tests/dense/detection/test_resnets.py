"""Detectors of ResNets: the head C4, frozen batch norm and the schedule of SGD, as Detectron2 and MoCo have them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import annotated
from helpers.commands import refused
from timm.layers import FrozenBatchNormAct2d
from torch import nn
from torchvision.ops.misc import FrozenBatchNorm2d

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import RecipeError
from eagleray.config.schedule import Progress
from eagleray.dense.detection import detection as protocol
from eagleray.dense.detection.data import Coco
from eagleray.dense.detection.train import DetectionSchedule, fit, load_schedule
from eagleray.models.backbone import Backbone

FROZEN = FrozenBatchNorm2d, FrozenBatchNormAct2d
SMALL: dict[str, Any] = {"drop_path": 0.0, "sizes": [64], "longest": 96, "channels": 16, "regions": 16, "anchor": 4}
SMALL |= {"optimizer": "sgd", "weight_decay": 1e-4, "parts": "detectron2", "batch": 2}


def resnet() -> Backbone:
    """A ResNet of random weights, whose batch norm has seen an image."""
    torch.manual_seed(0)
    backbone = Backbone("test_resnet")
    backbone(torch.randn(8, 3, 64, 64))
    return backbone


def build(**settings: Any) -> Any:
    return protocol.build(resnet(), 2, DetectionSchedule(**SMALL | settings))


def targets(*boxes: list[float]) -> dict[str, torch.Tensor]:
    """The objects of an image of 64 x 96 pixels, with masks that fill their boxes."""
    masks = torch.zeros(len(boxes), 64, 96, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[int(y0) : int(y1), int(x0) : int(x1)] = 1
    labels = torch.tensor([1 + i % 2 for i in range(len(boxes))], dtype=torch.int64)
    return {"boxes": torch.tensor(boxes).view(-1, 4), "labels": labels, "masks": masks}


def test_c4_reads_the_third_stage_and_its_head_is_the_fourth():
    whole, net = resnet().eval(), build(head="c4").eval()
    images, backbone = torch.randn(2, 3, 64, 96), whole.model
    third = backbone.layer3(
        backbone.layer2(backbone.layer1(backbone.maxpool(backbone.act1(backbone.bn1(backbone.conv1(images))))))
    )
    x = net.backbone(images)
    assert x.equal(third)
    assert x.shape[2:] == (4, 6), "a cell is 16 pixels"
    cut = net.roi_heads.box_roi_pool({"0": x}, [torch.tensor([[0.0, 0, 96, 64]])] * 2, [(64, 96)] * 2)
    assert cut.shape[2:] == (14, 14)
    stage, norm = net.roi_heads.box_head
    features = stage(cut)
    assert features.equal(backbone.layer4(cut))
    assert features.shape == (2, backbone.num_features, 7, 7)
    assert isinstance(norm, nn.BatchNorm2d), "MoCo's"
    assert net.roi_heads.mask_predictor(features).shape == (2, 3, 14, 14)
    scores, offsets = net.roi_heads.box_predictor(features)
    assert (scores.shape, offsets.shape) == ((2, 3), (2, 12))
    [cells], [ratios] = net.rpn.anchor_generator.sizes, net.rpn.anchor_generator.aspect_ratios
    assert (cells, ratios) == ((16, 32, 64, 128, 256), (0.5, 1.0, 2.0))
    assert net.rpn.head.cls_logits.out_channels == 15


@pytest.mark.parametrize("cascade", [False, True])
def test_box_heads_with_convolutions_train_and_detect(cascade: bool):
    net = build(cascade=cascade, convolutions=True)
    stage = net.roi_heads.stages[0] if cascade else net.roi_heads
    kinds = [type(m) for m in stage.box_head.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]
    assert kinds == 4 * [nn.Conv2d, nn.BatchNorm2d] + [nn.Linear]
    assert stage.box_predictor.bbox_pred.out_features == 12, "offsets of each class"
    losses = net(list(torch.rand(2, 3, 64, 96)), [targets([8.0, 8, 40, 40], [30.0, 20, 80, 60])] * 2)
    torch.stack(list(losses.values())).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    [found] = net.eval()(list(torch.rand(1, 3, 64, 96)))
    assert (found["boxes"] >= 0).all()
    assert found["masks"].shape[1:] == (1, 64, 96)


def test_the_cascade_of_swin_s_code():
    once, thrice = load_schedule("3x_swin"), load_schedule("3x_swin_cascade")
    assert config.to_plain(thrice) == config.to_plain(once) | {"cascade": True, "convolutions": True}
    with pytest.raises(ValueError, match="convolutions=true: expected head=fpn"):
        DetectionSchedule(head="c4", convolutions=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_losses_reach_what_is_trained_and_detections_lie_in_the_image(frozen: bool):
    net = build(head="c4", frozen=frozen)
    images = [torch.rand(3, 64, 96), torch.rand(3, 64, 96)]
    sum(net(images, [targets([8, 8, 40, 40], [50, 20, 90, 60]), targets([4, 30, 60, 50])]).values()).backward()
    assert [n for n, p in net.named_parameters() if p.requires_grad and p.grad is None] == []
    for found in net.eval()(images):
        assert found["masks"].shape == (len(found["boxes"]), 1, 64, 96)
        assert (found["boxes"] >= 0).all()
        assert (found["boxes"] <= torch.tensor([96, 64, 96, 64])).all()
        assert set(found["labels"].tolist()) <= {1, 2}


@pytest.mark.parametrize("settings", [{"head": "c4"}, {"head": "fpn"}, {"head": "fpn", "parts": "torchvision"}])
def test_images_whose_crop_shows_no_object_are_background(settings: dict[str, Any]):
    """A crop may have no object; then the detector learns from the background alone."""
    net = build(**settings)
    for given in ([targets(), targets([8, 8, 40, 40])], [targets(), targets()]):
        net.zero_grad()
        losses = net([torch.rand(3, 64, 96), torch.rand(3, 64, 96)], given)
        sum(losses.values()).backward()
        assert all(loss.isfinite() for loss in losses.values())
        assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    assert losses["loss_mask"] == losses["loss_box_reg"] == 0


def learn(folder: Path, **settings: Any) -> tuple[Any, list[float]]:
    """Train a detector on two images; return it and the losses of its steps."""
    net, how = build(**settings), DetectionSchedule(**SMALL | settings)
    said: list[str] = []
    fit(net, Coco.of(annotated.coco(folder / "set"), "train"), how, str(folder), folder, said.append)
    return net, [float(line.split("loss ")[1].split()[0]) for line in said if "loss " in line]


@pytest.mark.parametrize(
    "settings",
    [
        {"head": "c4", "frozen": True},
        pytest.param({"head": "c4"}, marks=pytest.mark.slow),
        pytest.param({"frozen": True}, marks=pytest.mark.slow),
    ],
)
def test_a_detector_of_a_resnet_learns_with_sgd(settings: dict[str, Any], tmp_path: Path):
    _, losses = learn(tmp_path, epochs=40, lr={"value": 0.02, "warmup": 2, "drops": [30]}, **settings)
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


@pytest.mark.parametrize("head", ["fpn", "c4"])
def test_frozen_batch_norm_stays_while_weights_learn(head: str, tmp_path: Path):
    before, first = resnet().model, build(head=head, frozen=True).state_dict()
    net, _ = learn(tmp_path, epochs=3, lr={"value": 0.02}, head=head, frozen=True)
    backbone = net.backbone.backbone if head == "c4" else net.backbone.maps.backbone
    assert not [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = {name: m for name, m in backbone.model.named_modules() if isinstance(m, FROZEN)}
    theirs = {name: m for name, m in before.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for name, norm in norms.items():
        for key in ("weight", "bias", "running_mean", "running_var"):
            assert getattr(norm, key).equal(getattr(theirs[name], key)), (name, key)
        assert norm.running_mean.any()
    stays = [name for name, p in backbone.model.named_parameters() if not p.requires_grad]
    assert {name.split(".")[0] for name in stays} == {"conv1", "layer1"}
    later = net.state_dict()
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert {name for name in first if not later[name].equal(first[name])} == trained
    assert any("layer4" in name or "box_head" in name for name in trained)


def test_trained_batch_norm_learns(tmp_path: Path):
    net, _ = learn(tmp_path, epochs=3, lr={"value": 0.02}, head="c4")
    assert not net.backbone.backbone.model.layer2[0].bn1.running_mean.equal(resnet().model.layer2[0].bn1.running_mean)


@pytest.mark.parametrize("name", ["1x_resnet", "1x_c4"])
def test_the_schedule_of_sgd_is_detectron2s(name: str):
    """90,000 steps of 16 of COCO's 117,266 images with objects; drops at 60,000 and 80,000, warmup of 1000 steps."""
    how, steps = load_schedule(name), 117_266 // 16
    assert how.steps(steps) == 90_000
    rates = {step: how.lr(Progress(step, steps, how.epochs)) for step in (0, 500, 1000, 59_999, 60_000, 79_999)}
    expected = {0: 2e-5, 500: 0.01001, 1000: 0.02, 59_999: 0.02, 60_000: 0.002, 79_999: 0.002}
    assert rates == pytest.approx(expected, rel=1e-4)
    assert (
        how.lr(Progress(80_000, steps, how.epochs))
        == how.lr(Progress(89_999, steps, how.epochs))
        == pytest.approx(2e-4)
    )
    assert (how.optimizer, how.weight_decay, how.batch) == ("sgd", 1e-4, 16)
    assert (how.head, how.frozen) == (("c4", False) if name == "1x_c4" else ("fpn", True))
    assert (how.sizes, how.longest, how.parts) == ((640, 672, 704, 736, 768, 800), 1333, "detectron2")


def test_the_schedules_of_selfpatch_and_swin_are_their_codes():
    selfpatch, swin = load_schedule("1x_selfpatch"), load_schedule("3x_swin")
    for how in (selfpatch, swin):
        assert (how.sizes, how.longest, how.crop) == (tuple(range(480, 801, 32)), 1333, True)
        assert (how.optimizer, how.head, how.frozen, how.parts) == ("adamw", "fpn", False, "detectron2")
    steps = 117_266 // 8
    at = {step: selfpatch.lr(Progress(step, steps, 12)) for step in (0, 1000, 8 * steps - 1, 8 * steps, 11 * steps)}
    expected = dict(zip(at, (5e-8, 5e-5, 5e-5, 5e-6, 5e-7), strict=True))
    assert at == pytest.approx(expected, rel=1e-3)
    assert (selfpatch.batch, swin.batch, swin.epochs, swin.lr.drops) == (8, 16, 36, (27, 33))


@pytest.mark.parametrize("key", ["head=c4", "frozen=true"])
def test_other_backbones_are_refused(key: str):
    name, value = key.split("=")
    how = DetectionSchedule(**SMALL | {name: True if value == "true" else value})
    vit = Backbone("vit_tiny_patch16_224", options={"embed_dim": 24, "depth": 4, "num_heads": 3})
    with pytest.raises(UserError) as caught:
        protocol.build(vit, 2, how)
    assert str(caught.value) == (
        f"--schedule: {key}: expected a ResNet as backbone, such as resnet50, got a VisionTransformer"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"head": "c4", "cascade": True}, "cascade=true: expected head=fpn"),
        ({"head": "c5"}, "head: input should be 'fpn' or 'c4', got 'c5'"),
        ({"optimizer": "lars"}, "optimizer: input should be 'adamw' or 'sgd', got 'lars'"),
        ({"epochs": 0}, "epochs: input should be greater than 0"),
    ],
)
def test_wrong_settings_are_one_line(wrong: dict[str, Any], said: str, tmp_path: Path):
    path = tmp_path / "wrong.yaml"
    path.write_text(json.dumps(wrong))
    with pytest.raises(RecipeError, match=said) as caught:
        load_schedule(str(path))
    assert "\n" not in str(caught.value)


def test_the_command_refuses_c4_on_a_transformer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, out = annotated.coco(tmp_path / "set"), str(tmp_path / "out")
    given = ["--protocol", "detection", "--coco", str(folder), "--schedule", "1x_c4", "--out", out]
    line = refused(capsys, "evaluate", "untrained:test_vit", *given)
    refusal = "--schedule: head=c4: expected a ResNet as backbone, such as resnet50, got a VisionTransformer"
    assert line == f"error: detection: {refusal}"
