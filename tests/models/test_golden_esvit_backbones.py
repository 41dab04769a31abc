"""The backbones that EsViT trains against the authors' code, github.com/microsoft/esvit."""

import re
from collections.abc import Callable
from typing import Any

import timm
import torch
from helpers.golden_cases import Case, cases
from torch import Tensor, nn

import eagleray.models.zoo.cvt_esvit
import eagleray.models.zoo.swin
import eagleray.models.zoo.vil  # noqa: F401  so that timm knows them

Read = Callable[[Tensor], Tensor]  # of a block's output, the tokens (B, N, C) whose mean the authors evaluate


def check(case: Case, model: Any, blocks: list[list[nn.Module]], read: list[Read]) -> None:
    """Check outputs, gradients and the last four blocks at every input size; `blocks` and `read` are by stage."""
    seen: dict[str, Tensor] = {}
    for i, stage in enumerate(blocks):
        for j, block in enumerate(stage):
            block.register_forward_hook(lambda _, args, out, at=f"{i}_{j}", of=read[i]: seen.update({at: of(out)}))
    for size in case.hyper["input_sizes"]:
        at, x = f"in{size}", case[f"in{size}/x"].requires_grad_()
        features = model.forward_features(x)
        pooled, region = model.forward_head(features, pre_logits=True), features.flatten(1, 2)
        ((region * case[f"{at}/cotangent_region"]).sum() + pooled.sum()).backward()
        case.check(region, f"{at}/region")
        case.check(pooled, f"{at}/pooled")
        case.check(x.grad, f"{at}/grad_x")
        for name in case.under(f"{at}/block"):
            case.check(seen[name], f"{at}/block{name}")
        last = str(len(blocks) - 1)
        four = [model.norm(out) if name.startswith(last) else out for name, out in list(seen.items())[-4:]]
        case.check(torch.cat([out.mean(1) for out in four], 1), f"{at}/last4")


@cases("esvit_swin")
def test_swin(case: Case) -> None:
    h = case.hyper
    model = timm.create_model(
        "esvit_swin_tiny_w7",
        num_classes=0,
        img_size=h["img_size"],
        patch_size=h["patch"],
        window_size=h["window"],
        **{name: h[name] for name in ("embed_dim", "depths", "num_heads", "mlp_ratio")},
    ).eval()
    # Ours, as timm's, downsample where a stage begins, theirs where it ends.
    later = {k: re.sub(r"(\d+)\.down", lambda m: f"{int(m[1]) + 1}.down", k) for k in case.under("param/")}
    model.load_state_dict({later[k]: v for k, v in case.under("param/").items()})
    assert model.norm.eps == h["ln_eps"]
    windows = [[[b.window_size[0], b.shift_size[0]] for b in stage.blocks] for stage in model.layers]
    assert windows == h["effective_window_shift_per_block"]
    check(case, model, [list(stage.blocks) for stage in model.layers], [lambda out: out.flatten(1, 2)] * len(windows))


@cases("esvit_vil")
def test_vil(case: Case) -> None:
    h = case.hyper
    stages = [{part[0]: int(part[1:]) for part in stage.split(",")} for stage in h["arch"].split("_")]
    assert h["share_w"]
    assert h["norm_embed"]
    assert all(s["a"] == 0 for s in stages)
    model = timm.create_model(
        "vil_tiny",
        num_classes=0,
        img_size=h["img_size"],
        windows=[s["f"] if s["s"] else None for s in stages],
        **{ours: [s[theirs] for s in stages] for ours, theirs in VIL.items()},
    ).eval()
    model.load_state_dict(vil_weights(case.under("param/")))
    assert model.norm.eps == h["ln_eps"]
    # Where a stage has a global token, its last blocks are evaluated by the first one.
    read: list[Read] = [(lambda out: out[:, :1]) if s["g"] else (lambda out: out) for s in stages]
    check(case, model, [list(stage.blocks) for stage in model.stages], read)


VIL = {"patches": "p", "dims": "d", "depths": "n", "heads": "h", "tokens": "g"}
VIL_NAMES = {
    "0.cls_token": "tokens",
    "0.proj": "embed",
    "0.norm_embed": "norm",
    "local_relative_position_bias_table": "table",
    "g2g_relative_position_bias": "among_global",
}


def vil_weights(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Theirs by our names: they have a block's two halves in a row, queries apart from keys and values in windows, and
    the projections of global tokens by a second name."""
    ours: dict[str, Tensor] = {}
    for name, value in theirs.items():
        if "_global." in name:
            assert torch.equal(value, theirs[name.replace("_global", "")])
            continue
        for old, new in VIL_NAMES.items():
            name = re.sub(rf"\b{re.escape(old)}\b", new, name)
        name = re.sub(r"layer(\d+)", lambda m: f"stages.{int(m[1]) - 1}", name)
        name = re.sub(r"(stages\.\d+)\.(\d+)\.norm", lambda m: f"{m[1]}.{m[2]}.norm{2 - int(m[2]) % 2}", name)
        name = re.sub(r"(stages\.\d+)\.(\d+)", lambda m: f"{m[1]}.blocks.{(int(m[2]) - 1) // 2}", name)
        if name.endswith("g2l_relative_position_bias"):
            attn = name.rpartition(".")[0]
            ours[f"{attn}.from_global"], ours[f"{attn}.to_global"] = value
        elif ".query." in name:
            ours[name.replace("query", "qkv")] = value
        elif ".kv." in name:
            qkv = name.replace("kv", "qkv")
            ours[qkv] = torch.cat([ours[qkv], value])
        else:
            ours[name] = value
    return ours


@cases("esvit_cvt")
def test_cvt(case: Case) -> None:
    spec = case.hyper["spec"]
    later = spec["NUM_STAGES"] - 1
    assert not any(spec["SHIFT"])
    assert not spec["REL_POS_EMBED"]
    assert (spec["PATCH_SIZE"], spec["PATCH_STRIDE"]) == ([7] + [3] * later, [4] + [2] * later)
    assert all(spec["QKV_BIAS"])
    model = timm.create_model(
        "cvt_tiny_esvit", num_classes=0, **{ours: spec[theirs] for ours, theirs in CVT.items()}
    ).eval()
    model.load_state_dict({cvt_name(name): value for name, value in case.under("param/").items()})
    assert model.norm.eps == case.hyper["ln_eps"]
    blocks = [list(stage[2:]) for stage in model.stages]
    check(case, model, blocks, [lambda out: out.flatten(2).mT] * len(blocks))


CVT = {
    "dims": "DIM_EMBED",
    "depths": "DEPTH",
    "heads": "NUM_HEADS",
    "mlp_ratios": "MLP_RATIO",
    "windows": "WINDOW_SIZE",
}
CVT_NAMES = {"0.fn.qkv.dw": "attn.qkv.0", "0.fn.qkv.bn": "attn.qkv.1", "0.fn.qkv.pw": "attn.qkv.2"}
CVT_NAMES |= {"0.fn.proj_out": "attn.proj", "1.fn.net": "mlp", "0.norm": "norm1", "1.norm": "norm2"}


def cvt_name(name: str) -> str:
    """Return our name for a parameter of the authors; a stage is a sequence of convolution, norm and blocks."""
    for old, new in CVT_NAMES.items():
        name = re.sub(rf"(layers\.\d+)\.{re.escape(old)}\b", rf"\1.{new}", name)
    name = re.sub(r"1\.layers\.(\d+)", lambda m: f"{int(m[1]) + 2}", name)
    return re.sub(r"stage(\d+)\.", r"stages.\1.", name).replace(".0.proj.", ".0.").replace(".0.norm.", ".1.")
