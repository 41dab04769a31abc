"""Size, cost and speed of the backbones in EsViT's tables (arXiv:2106.09785, tables 1, 4 and 8) and DRLoc's
(arXiv:2106.03746, table 2b), beside what they print.

A forward of 224-pixel images without gradients, in bfloat16 on a GPU as training runs, in alternating rounds.

params_m               million parameters without a classifier
gmacs                  1e9 multiply-adds of one image's forward, what papers call GFLOPs
images_per_s           median of the rounds
speed                  images_per_s / DeiT-S's, to compare machines by; where DeiT-S is measured too
published_params_m, published_images_per_s, published_speed    of the papers, the rates on a V100 (Caron et al. 2021);
                       DRLoc counts the classifier of ImageNet
"""

import importlib
import itertools
import pkgutil
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import common
import timm
import torch
from torch import Tensor, nn

from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.models import zoo
from eagleray.protocols.throughput import forward, multiplications


class Row(NamedTuple):
    timm: str
    params: float | None = None  # million
    rate: float | None = None  # images per second


ROWS = {
    "deit_s": Row("deit_small_patch16_224", 21, 1007),
    "resnet50": Row("resnet50", 24, 1237),
    "swin_t_w7": Row("esvit_swin_tiny_w7", 28, 808),
    "swin_s_w7": Row("esvit_swin_small_w7", 49, 467),
    "swin_b_w7": Row("esvit_swin_base_w7", 87, 297),
    "swin_t_w14": Row("esvit_swin_tiny_w14", 28, 660),
    "swin_s_w14": Row("esvit_swin_small_w14", 49, 383),
    "swin_b_w14": Row("esvit_swin_base_w14", 87, 254),
    "vil_t": Row("vil_tiny", 28, 386),
    "cvt_t": Row("cvt_tiny_esvit", 29, 848),
    "pvt_s": Row("pvt_small", 24, 851),
    "xcit_s12": Row("xcit_small_12_p16_224"),
    "t2t_vit_14": Row("t2t_vit_14", 22),
    "cvt_13": Row("cvt_13", 20),
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(ROWS)}")
    parser.add_argument("--batch", type=int, help="images of a forward; default: 128, on a CPU 4")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    known = available()
    for name in set(args.names) - set(known):
        raise UserError(f"{name}: no such backbone; there are {', '.join(known)}")
    device = common.device()
    batch = args.batch or (128 if devices.is_accelerator(device) else 4)
    nets = {name: build(ROWS[name], device) for name in args.names or known}
    result = {"device": device.type, "batch": batch, "rounds": args.rounds}
    common.show(result | table(nets, torch.randn(batch, 3, 224, 224, device=device), args.rounds), as_json=args.json)


def available() -> list[str]:
    """The rows whose backbone timm knows once all of our modules are there; each of them adds its own."""
    for module in pkgutil.iter_modules(zoo.__path__):
        importlib.import_module(f"eagleray.models.zoo.{module.name}")
    return [name for name, row in ROWS.items() if timm.is_model(row.timm)]


def build(row: Row, device: torch.device) -> nn.Module:
    net: nn.Module = timm.create_model(row.timm, num_classes=0)
    return net.eval().to(device)


def table(nets: Mapping[str, nn.Module], images: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    times = common.alternate(
        {name: partial(turn, net) for name, net in nets.items()}, itertools.repeat(images, rounds + 1)
    )
    out = {}
    for name, net in nets.items():
        found: dict[str, Any] = {
            "params_m": sum(p.numel() for p in net.parameters()) / 1e6,
            "gmacs": multiplications(net, images[:1]) / 1e9,
            "images_per_s": len(images) / times[name].wall,
            "speed": times["deit_s"].wall / times[name].wall if "deit_s" in times else None,
            "published_params_m": ROWS[name].params,
            "published_images_per_s": (rate := ROWS[name].rate),
            "published_speed": rate / (ROWS["deit_s"].rate or 1) if rate else None,
        }
        out[name] = {key: common.short(value) for key, value in found.items() if value is not None}
    return out


def turn(net: nn.Module, images: Tensor) -> None:
    forward(net, images)
    common.wait(images.device)


if __name__ == "__main__":
    common.run(main)
