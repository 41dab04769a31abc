"""Recognises checkpoints of DINO's, EsViT's, iBOT's, DINOv2's, DINOv3's, SelfPatch's, MoCo v3's and MoBY's authors.

The keys of a checkpoint tell its authors. Tensors outside of backbones get the names that they have in eagleray's
methods; those of a backbone keep the authors' names, which `weights.fill` reads."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from eagleray.models.tensor_files import State, tensors_in

STUDENT, TEACHER = "student", "teacher"  # the trained network and its momentum copy, in any method
WIDTHS = (192, 384, 768, 1024, 1536)  # ViTs of DINO, iBOT and DINOv2 of these widths have heads of 64 channels
MOCO_HEADS = 12  # every ViT of MoCo v3 has 12 heads, also ViT-S


class Layout(NamedTuple):
    """A checkpoint of a method, with eagleray's names."""

    authors: str  # the method whose authors use this layout
    exported: str  # the network whose backbone the authors evaluate: STUDENT or TEACHER
    backbones: dict[str, State]  # keys are STUDENT and TEACHER
    parts: State  # heads, predictors, centres and queues
    heads: dict[str, int]  # number of attention heads by module, as it cannot be told from the tensors' shapes


def recognise(checkpoint: Mapping[str, Any]) -> Layout | None:
    """Return the parts of an authors' checkpoint, or None for any other file."""
    return next((layout for read in LAYOUTS if (layout := read(checkpoint))), None)


def dino_family(checkpoint: Mapping[str, Any]) -> Layout | None:
    """Return a checkpoint of DINO, EsViT, iBOT, DINOv2, DINOv3 or SelfPatch; None if it has no teacher.

    These checkpoints have a teacher, centres and nearly always a student."""
    if not tensors_in(_mapping(checkpoint, TEACHER)):
        return None
    states = {role: tensors_in(_mapping(checkpoint, role)) for role in (STUDENT, TEACHER)}
    backbones = {role: dict(_dino_backbone(state)) for role, state in states.items()}
    parts = {f"{role}.{k}": v for role, state in states.items() for k, v in _dino_heads(state)}
    for role, backbone in backbones.items():
        parts |= {f"{role}.mask_token": backbone.pop(name) for name in MASK_TOKENS if name in backbone}
    losses = tensors_in(_mapping(checkpoint, "dino_loss") or _mapping(checkpoint, "ibot_loss"))
    parts |= {ours: losses[k].flatten() for k, ours in CENTRES.items() if k in losses}
    heads = _vit_heads(backbones[TEACHER], lambda width: width // 64 if width in WIDTHS else None)
    return Layout(_dino_authors(checkpoint, states[TEACHER]), TEACHER, backbones, parts, heads)


# DINO_HEADS maps the authors' names of heads to eagleray's. IBOT_PATCHES matches iBOT's layers for patches alone. They
# are skipped: no method here has them, and if iBOT's images and patches share the head, they are copies of its layers.
IBOT_PATCHES = re.compile(r"\.(last_layer|mlp|last_norm)2\.")
DINO_HEADS = {"head.": "head.", "head_dense.": "region_head.", "dino_head.": "head.", "ibot_head.": "patch_head."}
DINO_HEADS |= {"c_head.": "head.", "p_head.": "patch_head.", "ca_head.": "aggregation."}  # SelfPatch's names
NAMES = {"last_layer.": "last.", "cls_token": "token", "cls_blocks.": "blocks."}
NAMES |= {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
CENTRES = {"center": "center", "center_grid": "region_center", "center2": "patch_center"}
CENTRES |= {"patch_center": "patch_center"}
MASK_TOKENS = ("masked_embed", "mask_token")  # iBOT's and DINOv2's names


def _dino_authors(checkpoint: Mapping[str, Any], teacher: State) -> str:
    if any(k.startswith("dino_head.") for k in teacher):
        return "DINOv3" if any(".rope_embed." in k for k in teacher) else "DINOv2"
    if any(k.startswith("ca_head.") for k in teacher):
        return "SelfPatch"
    if "ibot_loss" in checkpoint or any("last_layer2." in k for k in teacher):
        return "iBOT"
    return "EsViT" if any(k.startswith("head_dense.") for k in teacher) else "DINO"


def _dino_backbone(state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the backbone, without the heads, which EsViT's transformers have among their own modules."""
    for key, value in state.items():
        if not key.startswith(tuple(DINO_HEADS)):
            yield key.removeprefix("backbone."), value


def _dino_heads(state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the heads under eagleray's names, without iBOT's layers for patches alone.

    Weight-normalised prototypes get the names of `torch.nn.utils.parametrizations.weight_norm`, whichever they had."""
    for theirs, ours in DINO_HEADS.items():
        for key in (k for k in state if k.startswith(theirs) and not IBOT_PATCHES.search(k)):
            name = key.removeprefix(theirs)
            for old, new in NAMES.items():
                name = name.replace(old, new)
            yield ours + name, state[key]


def moco_v3(checkpoint: Mapping[str, Any]) -> Layout | None:
    """Return a checkpoint of MoCo v3: two encoders, each with a projector as its classifier. None for other files."""
    state = tensors_in(_mapping(checkpoint, "state_dict"))
    encoders = {STUDENT: "base_encoder.", TEACHER: "momentum_encoder."}
    if not all(any(k.startswith(prefix) for k in state) for prefix in encoders.values()):
        return None
    backbones: dict[str, State] = {STUDENT: {}, TEACHER: {}}
    parts = {k: v for k, v in state.items() if k.startswith("predictor.")}
    for role, prefix in encoders.items():
        for key in (k for k in state if k.startswith(prefix)):
            name = key.removeprefix(prefix)
            if name.startswith(("head.", "fc.")):
                parts[f"{role}.head.{name.partition('.')[2]}"] = state[key]
            else:
                backbones[role][name] = state[key]
    heads = _vit_heads(backbones[STUDENT], lambda width: MOCO_HEADS if width in (384, 768) else None)
    return Layout("MoCo v3", STUDENT, backbones, parts, heads)


MOBY_HEADS = {"projector.": "student.head.", "projector_k.": "teacher.head.", "predictor.": "predictor."}


def moby(checkpoint: Mapping[str, Any]) -> Layout | None:
    """Return a checkpoint of MoBY (encoders, projectors, a predictor, two queues with one write index), or None."""
    state = tensors_in(_mapping(checkpoint, "model"))
    if not {"queue1", "queue2", "queue_ptr"} <= state.keys() or state["queue_ptr"].numel() != 1:
        return None
    backbones = {role: _under(state, prefix) for role, prefix in ((STUDENT, "encoder."), (TEACHER, "encoder_k."))}
    parts: State = {}
    for prefix, ours in MOBY_HEADS.items():
        parts |= {ours + k: v for k, v in _moby_mlp(_under(state, prefix)).items()}
    for queue in "queue1", "queue2":
        parts |= {f"{queue}.keys": state[queue], f"{queue}.next": state["queue_ptr"].reshape(())}
    return Layout("MoBY", STUDENT, backbones, parts, {})


def _moby_mlp(state: State) -> State:
    """Return the tensors of an MLP with our layer indices: MoBY's minus 1, as MoBY's layer 0 does nothing."""
    hidden = [int(m[1]) for k in state if (m := re.match(r"linear_hidden\.(\d+)\.", k))]
    last = max(hidden, default=-1) + 1  # our index of the output layer; the ReLU before it has no tensors
    named = {re.sub(r"^linear_hidden\.(\d+)", lambda m: str(int(m[1]) - 1), k): v for k, v in state.items()}
    return {re.sub(r"^linear_out", str(last), k): v for k, v in named.items()}


LAYOUTS: tuple[Callable[[Mapping[str, Any]], Layout | None], ...] = (dino_family, moco_v3, moby)


def _mapping(checkpoint: Mapping[str, Any], key: str) -> Mapping[Any, Any]:
    return value if isinstance(value := checkpoint.get(key), Mapping) else {}


def _under(state: State, prefix: str) -> State:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _vit_heads(backbone: State, heads_of: Callable[[int], int | None]) -> dict[str, int]:
    """Return the number of attention heads of each block of a ViT; empty for other backbones and unknown widths."""
    layers = {k.removesuffix(".qkv.weight"): v.shape[1] for k, v in backbone.items() if k.endswith(".attn.qkv.weight")}
    blocks = {name: heads_of(width) for name, width in layers.items() if name.startswith("blocks.")}
    return {name: heads for name, heads in blocks.items() if heads}
