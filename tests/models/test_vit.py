"""Tests of MoCo v3's ViTs: size, initialisation, positions, pooling, batch norm, convolutional stem and export."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import eagleray
from eagleray.base.errors import UserError
from eagleray.engine.export import snippet, to_timm
from eagleray.models.backbone import Backbone
from eagleray.models.batch_norm import PortableSyncBatchNorm, sync_batch_norms
from eagleray.models.network import Network

NAME = "vit_small_patch16_224"
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SIZES = {
    "S": ("vit_small_patch16_224", {"num_heads": 12}),
    "B": ("vit_base_patch16_224", {}),
    "L": ("vit_large_patch16_224", {}),
    "H": ("vit_huge_patch14_224", {}),
}


def tiny(**keys: Any) -> Backbone:
    return Backbone(NAME, **{"options": TINY, **keys})


@pytest.mark.parametrize(
    ("size", "blocks", "dim", "heads", "millions"),
    [("S", 12, 384, 12, 22), ("B", 12, 768, 12, 86), ("L", 24, 1024, 16, 304), ("H", 32, 1280, 16, 632)],
)
def test_sizes_are_those_of_the_paper(size: str, blocks: int, dim: int, heads: int, millions: int):
    name, options = SIZES[size]
    with torch.device("meta"):
        b = Backbone(name, options=options)
        parameters = sum(p.numel() for p in b.parameters()) + sum(p.numel() for p in nn.Linear(dim, 1000).parameters())
    assert (len(b.model.blocks), b.dim, b.model.blocks[0].attn.num_heads) == (blocks, dim, heads)
    assert int(parameters / 1e6) == millions  # with a classifier


@pytest.mark.parametrize("size", ["S", "B", "L"])
def test_patches_of_7_pixels_make_1024_tokens_of_hardly_more_parameters(size: str):
    name, options = SIZES[size]
    with torch.device("meta"):
        wide = Backbone(name, options={**options, "depth": 1}, position="none")
        b = Backbone(name, options={**options, "depth": 1, "patch_size": 7}, position="none")
        f = b(torch.empty(2, 3, 224, 224))
    assert f.grid == (32, 32)
    assert f.patches.shape == (2, 1024, b.dim)
    fewer = sum(p.numel() for p in wide.parameters()) - sum(p.numel() for p in b.parameters())
    assert fewer == 3 * (16**2 - 7**2) * b.dim


@pytest.mark.parametrize("patch", [None, 7])
@pytest.mark.parametrize("size", SIZES)
def test_moco_starts_within_its_bounds(size: str, patch: int | None):
    name, options = SIZES[size]
    torch.manual_seed(0)
    b = Backbone(name, init="moco", options={**options, "depth": 1, **({"patch_size": patch} if patch else {})})
    block, d, p = b.model.blocks[0], b.dim, b.model.patch_embed.patch_size[0]
    bounds = {
        block.attn.qkv: math.sqrt(6 / (d + d)),  # three D x D matrices
        block.attn.proj: math.sqrt(6 / (d + d)),
        block.mlp.fc1: math.sqrt(6 / (d + 4 * d)),
        block.mlp.fc2: math.sqrt(6 / (d + 4 * d)),
        b.model.patch_embed.proj: math.sqrt(6 / (3 * p * p + d)),
    }
    for layer, bound in bounds.items():
        assert layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert not layer.bias.any()
    assert b.model.cls_token.std().item() == pytest.approx(1e-6, rel=0.2)


@pytest.mark.parametrize("pool", ["timm", "mean"])
@pytest.mark.parametrize(("patch", "dim", "side"), [(7, 384, 32), (14, 1280, 16), (16, 768, 14)])
def test_sine_cosine_positions(patch: int, dim: int, side: int, pool: str):
    options = {"patch_size": patch, "embed_dim": dim, "depth": 0, "num_heads": 1}
    table = Backbone(NAME, position="sincos", pool=pool, options=options).model.pos_embed
    assert not table.requires_grad
    prefix = int(pool == "timm")
    assert table.shape == (1, prefix + side**2, dim)
    assert not table[0, :prefix].any()
    w = 10000 ** -(torch.arange(dim // 4) / (dim // 4))
    row, column = 3, side - 2
    want = torch.cat([torch.sin(row * w), torch.cos(row * w), torch.sin(column * w), torch.cos(column * w)])
    torch.testing.assert_close(table[0, prefix + row * side + column], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", ["sincos", "timm", "none"])
def test_only_positions_tell_patches_apart(position: str):
    """Without a position table the class token does not change when patches are permuted."""
    torch.manual_seed(0)
    b, x = tiny(position=position).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        one, other = b(x).pooled, b(x.roll(8, dims=3)).pooled
    assert torch.allclose(one, other, atol=1e-5) == (position == "none")


def test_pooling():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 32, 32)
    last, normed = tiny(pool="mean").eval(), tiny(pool="norm_mean").eval()
    last.model.load_state_dict({k: v for k, v in normed.model.state_dict().items() if not k.startswith("norm.")})
    for b in last, normed:
        assert b.model.cls_token is None
        assert b(x).patches.shape == (4, 16, 24)
        torch.testing.assert_close(b(x).pooled, b(x).patches.mean(1))
    with torch.no_grad():
        normed.model.norm.weight.fill_(3.0)
    torch.testing.assert_close(normed(x).patches, normed.model.norm(last(x).patches))
    assert not torch.allclose(normed(x).pooled, last(x).pooled, atol=0.1)


def test_batch_norm_sits_before_the_mlps_alone():
    b, x = tiny(norm="batch").train(), torch.randn(6, 3, 32, 32)
    seen: list[torch.Tensor] = []
    for block in b.model.blocks:
        assert isinstance(block.norm1, nn.LayerNorm)
        block.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    assert isinstance(b.model.norm, nn.LayerNorm)
    b(x).pooled.square().sum().backward()
    for tokens in seen:  # (B, N, D), alike over images and tokens
        assert tokens.shape == (6, 17, 24)
        torch.testing.assert_close(tokens.mean((0, 1)), torch.zeros(24), atol=1e-5, rtol=0)
        torch.testing.assert_close(tokens.var((0, 1), unbiased=False), torch.ones(24), atol=1e-2, rtol=0)
    assert all(p.grad is not None for p in b.parameters())
    b.eval()
    torch.testing.assert_close(b(x).pooled[:2], b(x[:2]).pooled)  # an image alone, by running statistics


@pytest.mark.parametrize("key", ["norm", "stem"])
def test_batch_norms_are_synchronised(key: str):
    b = tiny(norm="batch") if key == "norm" else conv(1)
    expected = sum(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in b.modules())
    found = [m for m in sync_batch_norms(b, torch.device("cpu")).modules() if isinstance(m, PortableSyncBatchNorm)]
    assert len(found) == expected == {"norm": 2, "stem": 4}[key]


def conv(depth: int, **keys: Any) -> Backbone:
    return Backbone(
        NAME, stem="conv", options={"img_size": 32, "embed_dim": 24, "depth": depth, "num_heads": 3}, **keys
    )


def test_conv_stem():
    b = conv(11, init="moco", position="sincos")
    layers = [m for m in b.model.patch_embed.proj if isinstance(m, nn.Conv2d)]
    assert [(m.out_channels, m.kernel_size[0], m.stride[0]) for m in layers] == [
        *[(24 // 8, 3, 2), (24 // 4, 3, 2), (24 // 2, 3, 2)],
        *[(24, 3, 2), (24, 1, 1)],
    ]
    assert [m.bias is not None for m in layers] == [False] * 4 + [True]
    assert len(b.model.blocks) == 11
    for size in (32, 64):
        f = b(torch.randn(2, 3, size, size))
        assert f.grid == (size // 16, size // 16)
        assert f.patches.shape == (2, (size // 16) ** 2, 24)
    f.pooled.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in b.model.patch_embed.parameters())


def test_tokens_of_a_batch_normalised_projection_have_no_mean_and_deviate_by_one():
    b = tiny(init="moco", patch_norm="batch")
    tokens = b.model.patch_embed(3 + 2 * torch.randn(4, 3, 32, 32)).flatten(0, -2)
    torch.testing.assert_close(tokens.mean(0), torch.zeros(24), atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens.std(0, correction=0), torch.ones(24), atol=1e-3, rtol=0)
    assert b.batch_norm


def test_a_weight_normalised_projection_begins_as_the_plain_one_and_learns_length_and_direction_apart():
    torch.manual_seed(0)
    plain = tiny(init="moco")
    torch.manual_seed(0)
    b = tiny(init="moco", patch_norm="weight")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(b(x).pooled, plain(x).pooled)
    length, direction = (p for n, p in b.model.patch_embed.named_parameters() if "original" in n)
    assert (length.shape, direction.shape) == ((24, 1, 1, 1), (24, 3, 8, 8))
    with torch.no_grad():
        direction.mul_(5)
    torch.testing.assert_close(b(x).pooled, plain(x).pooled)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "resnet50", "pool": "mean"}, "backbone.pool=mean: resnet50 is not"),
        ({"name": "resnet50", "norm": "batch"}, "backbone.norm=batch: resnet50 is not"),
        ({"name": "resnet50", "stem": "conv"}, "backbone.stem=conv: resnet50 is not"),
        ({"name": "resnet50", "init": "moco"}, "backbone.init=moco: resnet50 is not"),
        ({"name": "resnet50", "position": "none"}, "backbone.position=none: resnet50 is not"),
        ({"name": "swin_tiny_patch4_window7_224", "norm": "batch"}, "backbone.norm=batch: swin"),
        ({"stem": "conv", "options": {"patch_size": 7}}, "backbone.stem=conv makes patches of 16 pixels, not 7"),
        ({"name": "vit_base_patch8_224", "stem": "conv", "options": {"depth": 0}}, "patches of 16 pixels, not 8"),
        ({"stem": "conv", "freeze_patch": True}, "backbone.freeze_patch=true: there is no patch projection"),
        ({"patch_norm": "batch", "freeze_patch": True}, "patch_norm=batch: none is trained with backbone.freeze"),
        ({"patch_norm": "weight", "stem": "conv"}, "patch_norm=weight: none is trained with backbone.stem=conv"),
        ({"patch_norm": "weight", "name": "resnet50"}, "backbone.patch_norm=weight: resnet50 is not"),
        ({"position": "dino", "options": {"reg_tokens": 4}}, "backbone.position=dino: .* prefix tokens other than"),
        ({"pool": "mean", "options": {"class_token": True}}, "backbone.options.class_token: backbone.pool=mean"),
        ({"position": "sincos", "options": {"embed_dim": 30, "num_heads": 3}}, "multiple of 4, not 30"),
        ({"position": "sincos", "options": {"pos_embed": "none"}}, "has no position table"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(keys: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as e, torch.device("meta"):
        Backbone(**keys)
    assert "\n" not in str(e.value)


def shaken(network: Network) -> Backbone:
    """Return the model with random parameters and running statistics."""
    keys = ("position", "pool", "norm", "stem", "patch_norm", "options")
    b = Backbone(network.name, **{k: getattr(network, k) for k in keys})
    with torch.no_grad():
        for p in b.parameters():
            p.add_(0.1 * torch.randn_like(p))
    b.train()(torch.randn(8, 3, 32, 32))
    return b


@pytest.mark.parametrize(
    "keys",
    [
        {"norm": "batch", "stem": "conv"},
        pytest.param({"patch_norm": "batch"}, marks=pytest.mark.slow),
        {"patch_norm": "weight"},
    ],
    ids=str,
)
def test_a_network_without_a_timm_name_is_loaded_by_ours(keys: dict[str, Any], tmp_path: Path):
    options = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}
    network = Network(position="sincos", options=options, **keys)
    b = shaken(network)
    path = to_timm(b, network, tmp_path)
    assert snippet(tmp_path) == f"eagleray.load({str(path)!r})"
    again = eagleray.load(path)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(again(x).pooled, b.eval()(x).pooled)


def test_pooling_and_absent_positions_load_in_plain_timm(tmp_path: Path):
    network = Network(position="none", pool="mean", options=TINY)
    to_timm(shaken(network), network, tmp_path)
    said = json.loads((tmp_path / "backbone.json").read_text())
    assert said["timm"] == NAME
    assert said["options"] == {
        **TINY,
        "pos_embed": "none",
        "class_token": False,
        "global_pool": "avg",
        "fc_norm": False,
        "final_norm": False,
    }
    assert snippet(tmp_path).startswith("timm.create_model(")
