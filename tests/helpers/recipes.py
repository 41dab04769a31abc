"""Recipes that train in seconds, one for every method."""

import atexit
import functools
import re
import shutil
import tempfile

import timm
import torch
from safetensors.torch import save_file

SMALL = """
method: {name: mocov3, dim: 16, hidden: 32}
backbone: {name: vit_tiny_patch16_224, options: {img_size: 16, patch_size: 8, embed_dim: 24, depth: 2, num_heads: 3}}
views: [{size: 16, scale: [0.3, 1.0], solarize: 0.1}, {size: 16, scale: [0.3, 1.0], blur: 0.5}]
data: {lanes: 8, workers: 0}
optim: {batch: 32, epochs: 2, lr: {value: 1.0e-3, warmup: 0.2, end: 0.0}}
evaluate: {size: 16, resize: 16, probe_epochs: 5}
log_steps: 1
workers: 0
"""

# Every method at the size of a test: what its section and its views add to SMALL.
PAIR = "{size: 16, scale: [0.3, 1.0], solarize: 0.1}, {size: 16, scale: [0.3, 1.0], blur: 0.5}"
CROPS = f"[{PAIR}, {{size: 8, count: 2, scale: [0.1, 0.4]}}]"
METHODS = {
    "barlow_twins": "dim: 12, hidden: 16",
    "byol": "dim: 16, hidden: 32",
    "byol_regions": "dim: 16, hidden: 32, prototypes: 64, region_hidden: 32, bottleneck: 16",
    "densecl": "dim: 12, hidden: 16, queue: 64, momentum: {value: 0.9}",
    "detco": "dim: 12, queue: 64, momentum: {value: 0.9}",
    "dino": "prototypes: 64, hidden: 32, bottleneck: 16, freeze_last: 0.1",
    # A first step of SGD makes all features nearly the same, where KoLeo's gradient, 1 / d, enlarges roundings.
    "dinov2": (
        "prototypes: 64, patch_prototypes: 32, hidden: 32, bottleneck: 16, patch_bottleneck: 8, freeze_last: 0.1, "
        "koleo_weight: 0.001"
    ),
    # Steps 1 to 3 are anchored, and a new Gram teacher comes after step 2, of ten in an epoch.
    "dinov3": (
        "prototypes: 64, patch_prototypes: 32, hidden: 32, patch_hidden: 16, bottleneck: 16, patch_bottleneck: 8, "
        "freeze_last: 0.1, koleo_weight: 0.001, gram_start: 0.1, gram_every: 0.1, gram_refreshes: 1"
    ),
    "distill": (
        "hidden: 32, teacher: {name: vit_tiny_patch16_224, weights: WEIGHTS, "
        "options: {img_size: 16, patch_size: 4, embed_dim: 32, depth: 1, num_heads: 2}}"
    ),
    "drloc": "classes: 20, mixup: 0.0, cutmix: 0.0, pairs: 8, weight: {value: 0.5}, ema: 0.9",
    "esvit": "prototypes: 64, hidden: 32, bottleneck: 16, freeze_last: 0.1, region_from: 0.15",
    "ibot": "prototypes: 64, hidden: 32, bottleneck: 16, freeze_last: 0.1",
    "instdisc": "dim: 12, negatives: 16, proximal: 1.0",
    "instloc": "dim: 12, hidden: 16, queue: 64, momentum: {value: 0.9}, side: 4",
    "lejepa": "embedding: 16, hidden: 16, dim: 12, slices: 32",
    "mae": "mask_ratio: 0.5, decoder_dim: 16, decoder_depth: 1, decoder_heads: 2",
    "moby": "dim: 12, hidden: 16, queue: 64",
    "moco": "dim: 12, hidden: 16, queue: 64, momentum: {value: 0.9}, symmetric: true",
    "mocov3": "dim: 16, hidden: 32",
    "mpp": "corrupted: 0.5, masked: 0.5, exchanged: 0.3",
    "pirl": "dim: 12, negatives: 16, patch: 8",
    "pixpro": "dim: 16, hidden: 32, instance_weight: 0.5",
    "selfpatch": "prototypes: 64, patch_prototypes: 32, hidden: 32, bottleneck: 16, heads: 2, freeze_last: 0.1",
    "selfpatch_moby": "dim: 12, hidden: 16, queue: 64, patch_prototypes: 32, patch_hidden: 8, heads: 2, freeze_last: 0",
    "simclr": "dim: 12, hidden: 16",
    "simsiam": "dim: 24, hidden: 8",
    "supervised": "classes: 20, mixup: 0.0, cutmix: 0.0",
    "swav": "dim: 12, hidden: 16, prototypes: 20, queue: 40, queue_start: 0.1, freeze_prototypes: 1",
    "vicreg": "dim: 12, hidden: 16",
}
VIEWS = dict.fromkeys(("dino", "dinov2", "esvit", "ibot", "lejepa", "selfpatch", "swav"), CROPS)
VIEWS |= dict.fromkeys(("drloc", "supervised"), "[{size: 16, count: 2, scale: [0.3, 1.0]}]")
VIEWS |= dict.fromkeys(("distill", "instdisc", "mae", "mpp"), "[{size: 16, scale: [0.3, 1.0]}]")
LARGE, SHARP = "{size: 16, scale: [0.3, 1.0], flip: 0}", "{size: 24, scale: [0.3, 1.0], flip: 0, same_crop: true}"
VIEWS["dinov3"] = f"[{LARGE}, {SHARP}, {LARGE}, {SHARP}, {{size: 8, count: 2, scale: [0.1, 0.4]}}]"
VIEWS["instloc"] = f"[{PAIR}, {{size: 16}}]"
VIEWS |= {"pirl": "[{size: 16, scale: [0.3, 1.0]}, {size: 48, scale: [0.6, 1.0]}]"}
VIEWS["detco"] = f"[{PAIR}, {{size: 48, count: 2, scale: [0.6, 1.0]}}]"
VIT_ONLY = ("dinov2", "dinov3", "ibot", "mae", "mpp")  # which hide or drop patches
CNN_ONLY = ("detco", "instloc")  # which learn from the stages of a CNN; one without batch norm, as micro-batches need
# Strides end at 8: on a CPU the gradient of PyTorch's bfloat16 convolution of single pixels with stride 2 is garbage.
CNN = "{name: resnet10t, options: {channels: [8, 8, 16, 24], stem_width: 4, norm_layer: groupnorm1, output_stride: 8}}"


@functools.cache
def teacher_file() -> str:
    """A file with weights of the teacher of `distill`."""
    folder = tempfile.mkdtemp(prefix="eagleray-teacher-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}
        model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **size)
    save_file(model.state_dict(), path := f"{folder}/teacher.safetensors")
    return path


def small_recipe(method: str) -> str:
    """The text of a recipe of a method that trains in seconds."""
    text = SMALL.replace(
        "method: {name: mocov3, dim: 16, hidden: 32}", f"method: {{name: {method}, {METHODS[method]}}}"
    )
    text = text.replace("WEIGHTS", teacher_file()) if "WEIGHTS" in text else text
    text = re.sub(r"(?m)^backbone: .*", f"backbone: {CNN}", text) if method in CNN_ONLY else text
    return text.replace(f"views: [{PAIR}]", f"views: {VIEWS[method]}") if method in VIEWS else text
