"""Adapters change nothing at first, are all that is trained, and merge into the weights."""

import copy
from typing import Any

import pytest
import torch
from helpers.networks import network
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.models.ema import average, ema_copy, frozen_weights
from eagleray.models.layer_names import in_adapter
from eagleray.models.lora import adapt, merged
from eagleray.models.network import Lora
from eagleray.models.weights import fill, from_module

ALL = Lora(rank=4, alpha=8.0, targets=("qkv", "proj", "fc1", "fc2"))
SMALL: dict[str, Any] = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 3}
# A plain ViT, and those whose attention and MLP timm builds in other ways: Eva's qkv without a bias, with one that it
# adds itself, and SwiGLU, which divides the first layer of the MLP.
KINDS = {
    "vit_tiny_patch16_224": SMALL,
    "deit_tiny_distilled_patch16_224": SMALL,
    "vit_small_patch14_reg4_dinov2": SMALL | {"img_size": 28, "init_values": 0.5},
    "vit_small_patch16_dinov3": SMALL | {"init_values": 0.5},
    "vit_tiny_patch16_dinov3_qkvb": SMALL | {"init_values": 0.5},
    "vit_small_plus_patch16_dinov3": SMALL | {"init_values": 0.5},
    "eva02_tiny_patch14_224": SMALL | {"img_size": 28},
}


def build(name: str) -> tuple[Backbone, Tensor]:
    """A backbone, and images of its size."""
    torch.manual_seed(0)
    backbone = Backbone(name, options=KINDS[name])
    return backbone, torch.randn(4, 3, *[KINDS[name]["img_size"]] * 2)


def adapted(backbone: Backbone, settings: Lora = ALL, *, trained: bool = True) -> Backbone:
    """A copy with adapters, which `trained` makes what training might."""
    backbone = copy.deepcopy(backbone)
    adapt(backbone, settings)
    with torch.no_grad():
        for name, p in backbone.named_parameters():
            if trained and in_adapter(name):
                p.normal_(std=0.1)
    return backbone


def seen(backbone: Backbone, images: Tensor) -> list[Tensor]:
    """What a backbone computes in each of its ways."""
    out = backbone(images)
    return [out.pooled, out.patches, backbone.pooled(images), *backbone.pooled_sizes([images, images[:2]])]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_a_start_is_as_it_was_and_adapters_merge_into_the_weights(name: str, training: bool):
    backbone, images = build(name)
    backbone.train(training)
    before = seen(backbone, images)
    for now, want in zip(seen(adapted(backbone, trained=False), images), before, strict=True):
        assert torch.equal(now, want)
    taught = adapted(backbone)
    whole = merged(taught)
    assert whole.state_dict().keys() == backbone.state_dict().keys()
    for ours, theirs, old in zip(seen(taught, images), seen(whole, images), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert (ours - old).abs().max() > 1e-4, "the adapters do nothing"


@pytest.mark.parametrize("name", KINDS)
def test_adapters_alone_have_gradients(name: str):
    backbone, images = build(name)
    for settings, blocks, layers in ((ALL, 3, 4), (Lora(rank=4, blocks=1, targets=("proj",)), 1, 1)):
        taught = adapted(backbone, settings)
        taught.train()(images).pooled.square().sum().backward()
        moved = {n for n, p in taught.named_parameters() if p.grad is not None and p.grad.any()}
        assert moved == {n for n, p in taught.named_parameters() if p.requires_grad}
        assert all(map(in_adapter, moved))
        assert {n.split(".")[2] for n in moved} == {str(i) for i in range(3 - blocks, 3)}
        assert len({n.split(".")[4] for n in moved} - {"fc1_x"}) == layers


def test_micro_batches_and_masks_pass_through_the_adapters():
    backbone, images = build("vit_tiny_patch16_224")
    taught, kept = adapted(backbone).train(), torch.tensor([[0, 3]]).expand(4, -1)
    taught.micro_batch = 3
    for now, want in zip(taught.visible(images, kept), merged(taught).visible(images, kept), strict=True):
        torch.testing.assert_close(now, want, rtol=1e-5, atol=1e-5)


def test_a_momentum_copy_shares_what_is_frozen_and_follows_the_adapters():
    backbone, images = build("vit_tiny_patch16_224")
    online = adapted(backbone, trained=False)
    target = ema_copy(online)
    shared = {id(p) for p in frozen_weights(online)}
    assert {id(p) for p in target.parameters()} & {id(p) for p in online.parameters()} == shared
    assert len(shared) == len(list(backbone.parameters()))
    with torch.no_grad():
        for name, p in online.named_parameters():
            if in_adapter(name):
                p.add_(1.0)
    old = {n: p.clone() for n, p in target.named_parameters()}
    average(target, online, 0.75)
    for (name, now), want in zip(target.named_parameters(), online.parameters(), strict=True):
        torch.testing.assert_close(now, old[name] + 0.25 * (want - old[name]))
    base = merged(online).model.blocks[0].attn.qkv.weight
    assert not torch.equal(base, backbone.model.blocks[0].attn.qkv.weight)
    assert torch.equal(target.model.blocks[0].attn.qkv.weight, backbone.model.blocks[0].attn.qkv.weight)
    assert not torch.equal(target(images).pooled, online(images).pooled)


def test_weights_fill_what_lies_beside_the_adapters():
    source, taught = network(seed=1), adapted(network(seed=2), trained=False)
    report = fill(taught, from_module("source", source.model), whole=True)
    assert (report.share, report.missing, report.left) == (1.0, [], [])
    assert all(torch.equal(v, source.state_dict()[k]) for k, v in merged(taught).state_dict().items())


REFUSED = {
    "swin_tiny_patch4_window7_224": ({}, "SwinTransformer gets no adapters; expected a vision transformer that timm"),
    "resnet50": ({}, "ResNet gets no adapters"),
    "t2t_vit_14": ({}, "T2TViT gets no adapters"),
    "vit_tiny_patch16_224": ({"norm": "batch"}, "the batch norm of VisionTransformer would still change"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_backbones_without_such_layers_are_refused(name: str):
    keys, line = REFUSED[name]
    with pytest.raises(UserError, match=rf"^backbone\.lora: {line}[^\n]*$"):
        adapt(network(name, **keys), Lora(rank=4))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (Lora(rank=4, blocks=3), r"backbone\.lora\.blocks=3: VisionTransformer has 2 blocks$"),
        (Lora(rank=25), r"backbone\.lora\.rank=25: qkv has 24 channels at its end$"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Lora, line: str):
    with pytest.raises(UserError, match=line):
        adapt(network(), settings)


def test_a_target_that_no_block_has_is_refused_with_those_that_it_has():
    backbone = Backbone("vit_tiny_patch16_224", options=SMALL | {"block_fn": ParallelScalingBlock})
    has = r"in_proj, attn_out_proj, mlp_out_proj"
    with pytest.raises(UserError, match=rf"^backbone\.lora\.targets=qkv: a block of VisionTransformer has {has}$"):
        adapt(backbone, Lora(rank=4))
