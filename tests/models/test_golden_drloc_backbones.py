"""CvT-13 and T2T-ViT-14 against the code of DRLoc's authors, github.com/yhlleo/VTs-Drloc."""

import re

import torch
from helpers.golden_cases import Case, cases
from torch import Tensor

from eagleray.models.zoo.cvt13 import CvT
from eagleray.models.zoo.t2t import T2TViT, checkpoint_filter_fn, sinusoids

CVT = {  # our name of the authors' module
    r"layers\.(\d)\.2\.layers\.(\d+)": lambda m: f"stages.{m[1]}.{int(m[2]) + 2}",
    r"layers\.": "stages.",
    r"\.0\.norm\.": ".attention.0.",
    r"\.0\.fn\.to_out\.0\.": ".attention.1.out.",
    r"\.0\.fn\.to_(q|kv)\.net\.": r".attention.1.\1.",
    r"\.1\.norm\.": ".mlp.0.",
    r"\.1\.fn\.net\.0\.": ".mlp.1.0.",
    r"\.1\.fn\.net\.3\.": ".mlp.1.2.",
    r"\.g$": ".weight",
    r"\.b$": ".bias",
}


@cases("cvt_forward")
def test_cvt(case: Case) -> None:
    h = case.hyper
    model = CvT(
        num_classes=h["num_classes"],
        dims=[h[f"s{i}_emb_dim"] for i in (1, 2, 3)],
        depths=[h[f"s{i}_depth"] for i in (1, 2, 3)],
        heads=[h[f"s{i}_heads"] for i in (1, 2, 3)],
        kernels=h["emb_kernels"],
        strides=h["emb_strides"],
        head_dim=h["dim_head"],
        mlp_ratio=h["mlp_mult"],
        projection_kernel=h["proj_kernel"],
        kv_stride=h["kv_stride"],
    )
    ours = model.state_dict()
    weights = {renamed(name): value for name, value in case.under("w.").items()}
    model.load_state_dict({name: value.view_as(ours[name]) for name, value in weights.items()})
    check(case, model.eval())
    case.check(model.forward_features(case["x"]).permute(0, 3, 1, 2), "grid_final")


def renamed(name: str) -> str:
    for theirs, ours in CVT.items():
        name = re.sub(theirs, ours, name)
    return name


@cases("t2t_vit_forward")
def test_t2t_vit(case: Case) -> None:
    h = case.hyper
    assert h["tokens_type"] == "performer"
    model = T2TViT(
        **{n: h[n] for n in ("num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio")},
        **{n: h[n] for n in ("token_dim", "kernel_ratio", "qkv_bias")},
    )
    assert model.norm.eps == h["ln_eps"]
    weights = case.under("w.")
    position = weights.pop("pos_embed")
    case.check(sinusoids(*position.shape[1:], position.device).unsqueeze(0), "w.pos_embed")
    model.load_state_dict(checkpoint_filter_fn(weights, model))
    check(case, model.eval())
    case.check(model.patch_embed(case["x"]), "tokens_after_t2t")
    case.check(model.forward_features(case["x"]), "tokens_final")


def check(case: Case, model: torch.nn.Module) -> None:
    """Check the logits and the gradient with respect to the images."""
    x = case["x"].requires_grad_()
    logits: Tensor = model(x)
    (logits * case["cotangent"]).sum().backward()
    case.check(logits, "logits")
    case.check(x.grad, "grad_x")
