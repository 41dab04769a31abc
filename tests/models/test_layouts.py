"""Authors' checkpoints, made from the names that they publish: recognised, and with the features of the authors'."""

import argparse
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.golden_cases import Case, cases, vit
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.models import weights
from eagleray.models.backbone import Backbone
from eagleray.models.layouts import Layout, recognise
from eagleray.models.readings import shaped
from eagleray.models.weights import Weights, fill
from eagleray.runs.restore import pretrained

State = dict[str, Tensor]


def under(prefix: str, state: State) -> State:
    return {prefix + k: v for k, v in state.items()}


def negative(state: State) -> State:
    """Other values under the same names, for what must not be taken."""
    return {k: -v for k, v in state.items()}


def dino_head(width: int, prefix: str = "head.") -> State:
    sizes = {"mlp.0": (8, width), "mlp.2": (8, 8), "mlp.4": (4, 8)}
    mlp = {f"{prefix}{k}.weight": torch.randn(s) for k, s in sizes.items()}
    mlp |= {f"{prefix}{k}.bias": torch.randn(s[0]) for k, s in sizes.items()}
    return mlp | {f"{prefix}last_layer.weight_g": torch.ones(6, 1), f"{prefix}last_layer.weight_v": torch.randn(6, 4)}


def dino(state: State) -> dict[str, Any]:
    teacher = under("backbone.", state) | dino_head(384)
    student = under("module.", under("backbone.", negative(state)) | dino_head(384))
    loss = {"center": torch.randn(1, 6)}
    return {"student": student, "teacher": teacher, "dino_loss": loss, "epoch": 3, "args": argparse.Namespace(lr=1.0)}


def esvit(state: State) -> dict[str, Any]:
    """Of Swin: the heads are modules of the network itself, which downsamples where a stage ends."""
    theirs = {k.replace(f"layers.{i + 1}.down", f"layers.{i}.down"): v for k, v in state.items() for i in [stage(k)]}
    teacher = theirs | dino_head(768) | dino_head(768, "head_dense.")
    loss = {"center": torch.randn(1, 6), "center_grid": torch.randn(1, 6)}
    return {"student": under("module.", negative(teacher)), "teacher": teacher, "dino_loss": loss}


def stage(key: str) -> int:
    """The stage before the one that a tensor of timm's Swin belongs to; 9, which is none, for other tensors."""
    return int(key.split(".")[1]) - 1 if ".downsample." in key else 9


def ibot(state: State) -> dict[str, Any]:
    head = dino_head(384) | {
        "head.last_layer2.weight_g": torch.ones(6, 1),
        "head.last_layer2.weight_v": torch.ones(6, 4),
    }
    loss = {"center": torch.randn(1, 6), "center2": torch.randn(1, 1, 6)}
    student = under("module.", under("backbone.", negative(state) | {"masked_embed": torch.ones(1, 384)}) | head)
    return {"student": student, "teacher": under("backbone.", state) | head, "ibot_loss": loss}


def dinov2(state: State) -> dict[str, Any]:
    """What its training stores for evaluation: the teacher alone, whose blocks are in groups."""
    chunked = {re.sub(r"^blocks\.(\d+)", lambda m: f"blocks.{int(m[1]) // 6}.{m[1]}", k): v for k, v in state.items()}
    chunked["mask_token"] = torch.zeros(1, 384)
    return {"teacher": under("backbone.", chunked) | dino_head(384, "dino_head.") | dino_head(384, "ibot_head.")}


def moco_v3(state: State) -> dict[str, Any]:
    head = {"0.weight": torch.randn(8, 384), "1.running_mean": torch.randn(8), "3.weight": torch.randn(4, 8)}
    name = "head." if "pos_embed" in state else "fc."
    base = under("base_encoder.", state | under(name, head))
    momentum = under("momentum_encoder.", negative(state | under(name, head)))
    predictor = {"predictor.0.weight": torch.randn(8, 4)}
    return {"arch": "vit_small", "state_dict": under("module.", base | momentum | predictor)}


def moby(state: State) -> dict[str, Any]:
    theirs = {k.replace(f"layers.{i + 1}.down", f"layers.{i}.down"): v for k, v in state.items() for i in [stage(k)]}
    mlp = {"linear_hidden.1.weight": torch.randn(8, 768), "linear_hidden.2.weight": torch.randn(8)}
    mlp |= {"linear_hidden.2.running_mean": torch.randn(8), "linear_out.weight": torch.randn(4, 8)}
    model = under("encoder.", theirs) | under("encoder_k.", negative(theirs)) | under("projector.", mlp)
    model |= under("projector_k.", negative(mlp)) | under("predictor.", mlp)
    model |= {"queue1": torch.randn(4, 16), "queue2": torch.randn(4, 16), "queue_ptr": torch.tensor([8])}
    return {"model": model, "epoch": 3, "max_accuracy": 0.0}


def selfpatch(state: State) -> dict[str, Any]:
    """DINO's, with the aggregation and two heads apart. Its ViT has neither class token nor last norm."""
    blocks = {f"cls_blocks.{n}.attn.{part}.weight": torch.randn(384, 384) for n in (0, 1) for part in "qkv"}
    aggregation = under("ca_head.", {"cls_token": torch.randn(1, 1, 384), "norm.bias": torch.randn(384)} | blocks)
    heads = aggregation | dino_head(384, "c_head.") | dino_head(384, "p_head.")
    loss = {"center": torch.randn(1, 1, 6), "patch_center": torch.randn(1, 6)}
    student = under("module.", under("backbone.", negative(state)) | heads)
    return {"student": student, "teacher": under("backbone.", state) | heads, "dino_loss": loss, "epoch": 3}


VIT, SWIN, RESNET = "vit_small_patch16_224", "swin_tiny_patch4_window7_224", "resnet50"
NO_NORM = {"final_norm": False, "fc_norm": False}
TWELVE = {"num_heads": 12}  # attention heads of MoCo v3's ViT-S
AUTHORS: dict[str, tuple[str, Callable[[State], dict[str, Any]], str, dict[str, Any], str]] = {
    "DINO": ("DINO", dino, VIT, {}, "teacher"),
    "DINO, ResNet-50": ("DINO", dino, RESNET, {}, "teacher"),
    "EsViT": ("EsViT", esvit, SWIN, {}, "teacher"),
    "iBOT": ("iBOT", ibot, VIT, {}, "teacher"),
    "SelfPatch": ("SelfPatch", selfpatch, VIT, {"class_token": False, "global_pool": "avg"} | NO_NORM, "teacher"),
    "DINOv2": ("DINOv2", dinov2, "vit_small_patch14_dinov2", {"img_size": 224}, "teacher"),
    "MoCo v3": ("MoCo v3", moco_v3, VIT, TWELVE, "student"),
    "MoCo v3, ResNet-50": ("MoCo v3", moco_v3, RESNET, {}, "student"),
    "MoBY": ("MoBY", moby, SWIN, {}, "student"),
}


def backbone(name: str, options: dict[str, Any], seed: int = 0) -> Backbone:
    torch.manual_seed(seed)
    out = Backbone(name, options=options).eval()
    with torch.no_grad():
        for p in out.parameters():
            p.add_(0.02 * torch.randn_like(p))  # biases and norms that matter
    return out


def through_a_file(folder: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    torch.save(checkpoint, folder / "theirs.pth")
    return weights.load_tensors(folder / "theirs.pth")


def exported(layout: Layout) -> Weights:
    return Weights("theirs.pth", layout.backbones[layout.exported], layout.heads, "start.from")


@pytest.mark.parametrize("kind", AUTHORS)
def test_features_are_those_of_the_authors_weights(kind: str, tmp_path: Path):
    authors, write, name, options, exports = AUTHORS[kind]
    theirs, ours = backbone(name, options, seed=1), backbone(name, options)
    layout = recognise(through_a_file(tmp_path, write(theirs.model.state_dict())))
    assert layout is not None
    assert (layout.authors, layout.exported) == (authors, exports)
    report = fill(ours, exported(layout), whole=True)
    assert report.share == 1
    assert not [*report.resized, *report.missing]
    for size in 224, 112:
        x = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            assert torch.equal(ours(x).pooled, theirs(x).pooled), size


def test_the_parts_of_a_method_get_our_names(tmp_path: Path):
    state = {"norm.weight": torch.ones(3)}
    layout = recognise(esvit(state))
    assert layout is not None
    heads = [f"{role}.{head}" for role in ("student", "teacher") for head in ("head", "region_head")]
    tensors = [
        "mlp.0.weight",
        "mlp.4.bias",
        "last.parametrizations.weight.original0",
        "last.parametrizations.weight.original1",
    ]
    assert {f"{head}.{name}" for head in heads for name in tensors} <= layout.parts.keys()
    assert layout.parts["center"].shape == layout.parts["region_center"].shape == (6,)
    theirs = moby(state)
    layout = recognise(theirs)
    assert layout is not None
    parts = layout.parts
    assert torch.equal(parts["student.head.0.weight"], theirs["model"]["projector.linear_hidden.1.weight"])
    assert torch.equal(parts["teacher.head.3.weight"], theirs["model"]["projector_k.linear_out.weight"])
    assert torch.equal(parts["predictor.1.running_mean"], theirs["model"]["predictor.linear_hidden.2.running_mean"])
    assert torch.equal(parts["queue1.keys"], theirs["model"]["queue1"])
    assert parts["queue2.next"] == 8
    layout = recognise(moco_v3(state | {"pos_embed": torch.ones(1)}))
    assert layout is not None
    assert {"student.head.3.weight", "teacher.head.0.weight", "predictor.0.weight"} <= layout.parts.keys()
    layout = recognise(ibot(state))
    assert layout is not None
    of_dino = recognise(dino(state))
    assert of_dino is not None
    assert layout.parts.keys() == of_dino.parts.keys() | {"patch_center", "student.mask_token"}
    assert torch.equal(layout.parts["student.mask_token"], torch.ones(1, 384))
    layout = recognise(selfpatch(state))
    assert layout is not None
    names = ["aggregation.token", "aggregation.blocks.1.attn.k.weight", "aggregation.norm.bias", "head.mlp.0.bias"]
    names += [f"{head}.last.parametrizations.weight.original1" for head in ("head", "patch_head")]
    assert {f"{role}.{name}" for role in ("student", "teacher") for name in names} <= layout.parts.keys()
    assert layout.parts["center"].shape == layout.parts["patch_center"].shape == (6,)
    layout = recognise(dinov2(state))
    assert layout is not None
    assert {"teacher.mask_token", "teacher.head.last.parametrizations.weight.original1"} <= layout.parts.keys()
    assert "teacher.patch_head.last.parametrizations.weight.original1" in layout.parts


@pytest.mark.parametrize("other", [{}, {"epoch": 3}, {"model": {"norm.weight": torch.ones(3)}}, {"state_dict": 3}])
def test_other_files_are_no_checkpoints_of_authors(other: dict[str, Any]):
    assert recognise(other) is None


def test_the_attention_heads_of_moco_v3_are_checked(tmp_path: Path):
    layout = recognise(moco_v3(backbone(VIT, TWELVE).model.state_dict()))
    assert layout is not None
    with pytest.raises(UserError, match=r"has 12 attention heads .* but 6 in the model; backbone.options.num_heads=12"):
        fill(backbone(VIT, {}), exported(layout))


def test_attention_heads_are_checked_in_evaluations_and_fine_tuning(tmp_path: Path):
    torch.save(moco_v3(backbone(VIT, TWELVE | {"depth": 1}).model.state_dict()), tmp_path / "theirs.pth")
    with pytest.raises(UserError, match=r"has 12 attention heads in the weights, but 6 in the model"):
        fill(backbone(VIT, {"depth": 1}), pretrained(str(tmp_path / "theirs.pth")))


def test_options_of_training_scripts_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MoBY's checkpoints hold a CfgNode of yacs, which is not installed here."""
    module: Any = types.ModuleType("yacs.config")
    module.CfgNode = type("CfgNode", (dict,), {"__module__": "yacs.config"})
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", module)
    node = module.CfgNode(MODEL=module.CfgNode(TYPE="swin"))
    node.__dict__["__deprecated_keys__"] = set()
    torch.save(moby({"norm.weight": torch.ones(3)}) | {"config": node}, tmp_path / "moby.pth")
    monkeypatch.undo()
    layout = recognise(weights.load_tensors(tmp_path / "moby.pth"))
    assert layout is not None
    assert torch.equal(layout.backbones["student"]["norm.weight"], torch.ones(3))


REG = {"img_size": 56, "patch_size": 14, "embed_dim": 24, "depth": 2, "num_heads": 3, "init_values": 1e-5}


def plain(state: State) -> Weights:
    return weights.from_tensors("file.pth", state, "start.from")


def dinov2_with_registers() -> tuple[Backbone, State]:
    """A ViT of timm, and its weights as DINOv2's authors write them: the class token's position is apart."""
    theirs = backbone("vit_small_patch14_reg4_dinov2", REG, seed=1)
    state = dict(theirs.model.state_dict())
    of_class = torch.randn(1, 1, 24)
    state |= {"register_tokens": state.pop("reg_token"), "mask_token": torch.zeros(1, 24)}
    state |= {"cls_token": state["cls_token"] - of_class, "pos_embed": torch.cat([of_class, state["pos_embed"]], 1)}
    return theirs, state


def test_registers_are_kept():
    theirs, state = dinov2_with_registers()
    ours = backbone("vit_small_patch14_reg4_dinov2", REG)
    report = fill(ours, plain(state), whole=True)
    assert report.left == ["mask_token"]
    x = torch.randn(2, 3, 56, 56)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x).pooled, theirs(x).pooled)


DINOV3 = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "vit_small_patch16_dinov3_qkvb"])
def test_dinov3_is_read_with_timms_names_and_its_authors(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The authors' have a bias for keys, which is zero, and their rotary positions are computed."""
    theirs, ours = backbone(name, DINOV3, seed=1), backbone(name, DINOV3)
    state = theirs.model.state_dict()
    names = {"reg_token": "storage_tokens", ".gamma_": ".ls_gamma"}
    written = {"mask_token": torch.zeros(1, 24), "rope_embed.periods": torch.ones(3)}
    for key, value in state.items():
        for new, old in names.items():
            key = re.sub(r"\.ls_gamma(\d)$", r".ls\1.gamma", key.replace(new, old))
        if key.endswith("attn.q_bias"):
            zero = torch.zeros_like(value)
            written[key.replace("q_bias", "qkv.bias")] = torch.cat([value, zero, state[f"{key[:-6]}v_bias"]])
            written[key.replace("q_bias", "qkv.bias_mask")] = torch.ones(72)
        elif not key.endswith("v_bias"):
            written[key] = value
    for content in (
        state,
        {"model": under("module.backbone.", state)},
        written,
        {"teacher": under("backbone.", written)},
    ):
        report = fill(ours, plain(through_a_file(tmp_path, content)), whole=True)
        assert report.share == 1
        assert not report.missing
        x = torch.randn(2, 3, 32, 32)
        with torch.inference_mode():
            assert torch.equal(ours(x).pooled, theirs(x).pooled)
            ours.model.norm.weight.zero_()  # for the next
    assert capsys.readouterr().out == ""


def dinov3_of_authors(net: Backbone) -> State:
    """The weights of a transformer of timm by the names that DINOv3's authors publish."""
    state, out = net.model.state_dict(), {"mask_token": torch.zeros(1, 24), "rope_embed.periods": torch.ones(3)}
    for key, value in state.items():
        if key.endswith("q_bias"):
            out[key.replace("q_bias", "qkv.bias")] = torch.cat([value, 0 * value, state[key.replace("q_", "v_")]])
            out[key.replace("q_bias", "qkv.bias_mask")] = torch.ones(72)
        elif not key.endswith("v_bias"):
            out[re.sub(r"\.gamma_(\d)$", r".ls\1.gamma", key.replace("reg_token", "storage_tokens"))] = value
    return out


def test_the_teacher_of_dinov3s_training_is_a_checkpoint_of_its_authors(tmp_path: Path):
    wide = DINOV3 | {"embed_dim": 384, "num_heads": 6}
    theirs, ours = (backbone("vit_small_patch16_dinov3", wide, seed=seed) for seed in (1, 0))
    written = under("backbone.", dinov3_of_authors(theirs))
    heads = dino_head(384, "dino_head.") | dino_head(384, "ibot_head.")
    layout = recognise(through_a_file(tmp_path, {"teacher": written | heads}))
    assert layout is not None
    assert (layout.authors, layout.exported) == ("DINOv3", "teacher")
    assert "teacher.patch_head.last.parametrizations.weight.original1" in layout.parts
    assert fill(ours, exported(layout), whole=True).share == 1
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(ours(x).pooled, theirs(x).pooled)


def test_biases_that_a_dinov3_of_timm_lacks_are_named():
    theirs, ours = (
        backbone("vit_small_patch16_dinov3_qkvb", DINOV3, seed=1),
        backbone("vit_small_patch16_dinov3", DINOV3),
    )
    state = dinov3_of_authors(theirs)
    with pytest.raises(UserError, match=r"has blocks.0.attn.qkv.bias and 1 more .*; backbone.name=NAME_qkvb adds them"):
        fill(ours, plain(state), whole=True)
    zero = {k: 0 * v if k.endswith("qkv.bias") else v for k, v in state.items()}
    assert fill(ours, plain(zero), whole=True).share == 1


def convnext_of_authors(net: Backbone) -> State:
    """The weights of a ConvNeXt of timm by the names that DINOv3's authors publish; they repeat the last norm."""
    out = {}
    for key, value in net.model.state_dict().items():
        key = re.sub(r"^stem\.", "downsample_layers.0.", key)
        key = re.sub(r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1.", key)
        key = re.sub(r"^stages\.(\d)\.blocks\.", r"stages.\1.", key)
        key = key.replace("conv_dw", "dwconv").replace("mlp.fc", "pwconv").replace("head.norm", "norm")
        out[key] = value
    return out | {f"norms.3.{part}": out[f"norm.{part}"] for part in ("weight", "bias")}


CONVNEXT = {"dims": [8, 8, 16, 24], "depths": [1, 1, 2, 1]}


def test_convnexts_of_dinov3_are_read_with_their_authors_names():
    theirs, ours = backbone("convnext_tiny", CONVNEXT, seed=1), backbone("convnext_tiny", CONVNEXT)
    report = fill(ours, plain(convnext_of_authors(theirs)), whole=True)
    assert report.share == 1
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(ours(x).pooled, theirs(x).pooled)


def test_registers_that_the_backbone_lacks_are_named():
    _, state = dinov2_with_registers()
    with pytest.raises(UserError, match=r"^start.from=file.pth: has register_tokens inside .*options.reg_tokens=4"):
        fill(backbone("vit_small_patch14_dinov2", REG), plain(state), whole=True)
    without = {k: v for k, v in state.items() if k != "register_tokens"}
    keys = {k: v for k, v in REG.items() if k != "init_values"}
    with pytest.raises(UserError, match=r"has blocks.0.ls1.gamma and 3 more tensors .*options.init_values=1e-5"):
        fill(backbone("vit_small_patch16_224", keys), plain(without), whole=True)


def test_positions_for_registers_are_added():
    """A ViT with positions for its registers takes over one that has none: they begin with the position zero."""
    options = REG | {"img_size": 28}
    theirs, ours = backbone(VIT, options, seed=1), backbone(VIT, options | {"reg_tokens": 2})
    report = fill(ours, plain(theirs.model.state_dict()), whole=True)
    assert report.resized == ["pos_embed 1x7x24 of 1x5x24"]
    assert report.missing == ["reg_token"]
    table, own = theirs.model.pos_embed, ours.model.pos_embed
    torch.testing.assert_close(own, torch.cat([table[:, :1], torch.zeros(1, 2, 24), table[:, 1:]], 1))


def test_as_many_registers_as_patches_are_added():
    """The table without registers has as many rows as the other one has prefix tokens."""
    options = REG | {"img_size": 28}
    theirs, ours = backbone(VIT, options, seed=1), backbone(VIT, options | {"reg_tokens": 4})
    assert fill(ours, plain(theirs.model.state_dict()), whole=True).resized == ["pos_embed 1x9x24 of 1x5x24"]
    table, own = theirs.model.pos_embed, ours.model.pos_embed
    torch.testing.assert_close(own, torch.cat([table[:, :1], torch.zeros(1, 4, 24), table[:, 1:]], 1))


def test_positions_by_row_and_column_are_resampled():
    """Those of SAM and VOLO; NesT's positions of blocks and of the patches inside are not."""
    table, own = torch.full((1, 4, 4, 24), 0.5), torch.zeros(1, 2, 2, 24)
    resampled = shaped(None, "pos_embed", table, {"pos_embed": own})
    torch.testing.assert_close(resampled, torch.full((1, 2, 2, 24), 0.5))
    assert shaped(None, "levels.0.pos_embed", table, {"levels.0.pos_embed": own}) is None


def test_patches_of_another_size_are_resampled():
    theirs = backbone(VIT, REG | {"patch_size": 8, "img_size": 32}, seed=1)
    ours = backbone(VIT, REG | {"patch_size": 16, "img_size": 64})
    with torch.no_grad():
        theirs.model.patch_embed.proj.weight[:] = theirs.model.patch_embed.proj.weight.mean((2, 3), keepdim=True)
    report = fill(ours, plain(theirs.model.state_dict()), whole=True)
    assert report.resized == ["patch_embed.proj.weight 24x3x16x16 of 24x3x8x8"]
    # A smooth image looks the same at both sizes.
    x = torch.randn(1, 3, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    with torch.inference_mode():
        mine = ours.model.patch_embed(x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        torch.testing.assert_close(mine, theirs.model.patch_embed(x), rtol=0.02, atol=0.02)


def test_names_of_transformers_become_timms(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    config |= {"image_size": 28, "patch_size": 14, "layer_norm_eps": 1e-6}
    options = {"img_size": 28, "patch_size": 14, "embed_dim": 24, "depth": 2, "num_heads": 3}
    x = torch.randn(2, 3, 28, 28)
    for model, ours in (
        (transformers.ViTModel(transformers.ViTConfig(**config)), backbone(VIT, options)),
        (
            transformers.Dinov2Model(transformers.Dinov2Config(**config, mlp_ratio=4)),
            backbone("vit_small_patch14_dinov2", options),
        ),
    ):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * torch.randn_like(p))
        model.save_pretrained(tmp_path)
        state = weights.load_tensors(tmp_path / "model.safetensors")
        for given in state, {"state_dict": under("module.model.vit.", state)}:
            report = fill(ours, plain(given), whole=True)
            assert report.share == 1
            assert not [key for key in report.left if "attention" in key]
        with torch.inference_mode():
            theirs = model.eval()(x).last_hidden_state[:, 0]
            torch.testing.assert_close(ours(x).pooled, theirs, rtol=1e-4, atol=1e-4)


def test_names_of_transformers_for_dinov3_become_timms(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    config |= {"image_size": 32, "patch_size": 8, "num_register_tokens": 4}
    vit = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**config))
    cnn_config = {"hidden_sizes": CONVNEXT["dims"], "depths": CONVNEXT["depths"]}
    cnn = transformers.DINOv3ConvNextModel(transformers.DINOv3ConvNextConfig(**cnn_config))
    x = torch.randn(2, 3, 64, 64)
    for model, ours in (
        (vit, backbone("vit_small_patch16_dinov3_qkvb", DINOV3 | {"global_pool": "token"})),
        (cnn, backbone("convnext_tiny", CONVNEXT)),
    ):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * torch.randn_like(p))
        model.save_pretrained(tmp_path)
        state = weights.load_tensors(tmp_path / "model.safetensors")
        renamed = {re.sub(r"^(layer|stages)\.", r"model.\1.", k): v for k, v in state.items()}
        for given in state, under("backbone.", state), renamed:
            report = fill(ours, plain(given), whole=True)
            assert report.share == 1
            assert not report.missing
        with torch.inference_mode():
            theirs = model.eval()(x).last_hidden_state[:, 0]
            torch.testing.assert_close(ours(x).pooled, theirs, rtol=1e-4, atol=1e-4)


def check(case: Case, ours: nn.Module, checkpoint: dict[str, Any]) -> None:
    layout = recognise(checkpoint)
    assert layout is not None
    assert isinstance(ours, Backbone)
    report = fill(ours.eval(), exported(layout), whole=True)
    assert report.share == 1


@cases("dino_vit_posembed")
def test_dinos_code_has_the_same_features_at_every_size(case: Case) -> None:
    h, arrays = case.hyper["vit"], case.under("vit/")
    ours = vit(h["img"], h["patch"], h["dim"], h["depth"], h["heads"], ln_eps=h["ln_eps"], position="dino")
    check(case, ours, dino(case.under("vit/param/")))
    sizes = [name.removeprefix("x") for name in arrays if name[0] == "x" and name[1].isdigit()]
    assert len(sizes) > 1
    for size in sizes:
        case.check(ours(arrays[f"x{size}"]).pooled, f"vit/cls{size}")


@cases("esvit_swin")
def test_esvits_code_has_the_same_features_at_every_size(case: Case) -> None:
    h = case.hyper
    options = {"img_size": h["img_size"], "patch_size": h["patch"], "window_size": h["window"]}
    options |= {name: h[name] for name in ("embed_dim", "depths", "num_heads", "mlp_ratio")}
    ours = Backbone("esvit_swin_tiny_w7", options=options)
    check(case, ours, {"teacher": case.under("param/") | dino_head(48) | dino_head(48, "head_dense.")})
    assert len(h["input_sizes"]) > 1
    for size in h["input_sizes"]:
        case.check(ours(case[f"in{size}/x"]).pooled, f"in{size}/pooled")


@cases("moco_v3_vit_forward")
def test_moco_v3s_code_has_the_same_features(case: Case) -> None:
    h = case.hyper
    sizes = [h[n] for n in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")]
    ours = vit(*sizes, ln_eps=h["ln_eps"], mlp_ratio=h["mlp_ratio"], position="sincos")
    check(case, ours, moco_v3(case.under("w.")))
    case.check(ours(case["x"]).pooled, "out")
