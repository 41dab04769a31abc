"""Low-rank adapters of a vision transformer's linear layers: LoRA (Hu et al. 2021, arXiv:2106.09685).

A layer with weights W computes W x + (alpha / rank) B A x. Only A and B are trained. B starts at zero, so the first
outputs are those of the starting weights; A starts like PyTorch's linear layers, as in the authors' code. Norms, biases
and position tables are frozen too, so what a run changes in its backbone is A and B, which can be merged into W."""

import copy
import hashlib
import json
import types
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.models import Eva, VisionTransformer
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.models.layer_names import in_adapter
from eagleray.models.network import Lora
from eagleray.models.stages import blocks
from eagleray.models.tensor_files import hash_tensors

if TYPE_CHECKING:
    from eagleray.models.backbone import Backbone

# Names of a target's layers, also in models that divide the target into several layers.
PARTS = {"qkv": ("qkv", "q_proj", "k_proj", "v_proj"), "fc1": ("fc1", "fc1_g", "fc1_x")}


class Adapter(nn.Module):
    """The matrices A (rank, C) and B (D, rank) of a linear layer from C to D channels."""

    def __init__(self, layer: nn.Linear, settings: Lora) -> None:
        super().__init__()
        self.scale = settings.alpha / settings.rank
        self.a = nn.Linear(layer.in_features, settings.rank, bias=False)
        self.b = nn.Linear(settings.rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def add(self, y: Tensor, x: Tensor, rows: slice | None = None) -> Tensor:
        """Return the sum of a layer's output y (..., D) and the adapter's output, both for the input x (..., C).

        If y has only some channels of the layer's output, `rows` are these channels."""
        low = self.a(x)
        return torch.add(y, self.b(low) if rows is None else F.linear(low, self.b.weight[rows]), alpha=self.scale)


class Adapters(NamedTuple):
    """The adapters that `merge` added to the weights of a backbone."""

    tensors: dict[str, Tensor]  # A and B; keys are the layer's name with `.a` or `.b`
    about: dict[str, str]  # the settings as JSON, and the SHA-256 of the weights without adapters


def adapt(backbone: "Backbone", settings: Lora) -> None:
    """Freeze a backbone in place and give its layers adapters. Raises UserError when the settings do not fit it."""
    model, name = backbone.model, type(backbone.model).__name__
    if not isinstance(model, VisionTransformer | Eva):
        raise UserError(
            f"backbone.lora: {name} gets no adapters; expected a vision transformer that timm builds as "
            "VisionTransformer, like DINOv2's, or as Eva, like DINOv3's"
        )
    if backbone.batch_norm:
        raise UserError(f"backbone.lora: the batch norm of {name} would still change; expected a ViT without it")
    every = blocks(model)
    if (count := settings.blocks or len(every)) > len(every):
        raise UserError(f"backbone.lora.blocks={count}: {name} has {len(every)} blocks")
    model.requires_grad_(False)
    model.adapted = settings  # type: ignore[assignment]
    for block in every[-count:]:
        layers = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        for target in settings.targets:
            chosen = [n for n in layers if n.rpartition(".")[2] in PARTS.get(target, (target,))]
            if not chosen:
                raise UserError(f"backbone.lora.targets={target}: a block of {name} has {', '.join(layers)}")
            for layer in (layers[n] for n in chosen):
                if settings.rank > (most := min(layer.weight.shape)):
                    raise UserError(f"backbone.lora.rank={settings.rank}: {target} has {most} channels at its end")
                layer.lora = Adapter(layer, settings)
                layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]  # keeps layers' names
        if hasattr(block.attn, "qkv_bias_separate"):
            block.attn.qkv_bias_separate = True  # otherwise Eva uses qkv's weights directly, without the adapter


def _forward(self: Any, x: Tensor) -> Tensor:
    return self.lora.add(type(self).forward(self, x), x)


def merged(backbone: "Backbone") -> "Backbone":
    """Return a copy of a backbone with its adapters merged; the backbone itself where it has none."""
    if hasattr(backbone.model, "adapted"):
        backbone = copy.deepcopy(backbone)
        merge(backbone)
    return backbone


@torch.no_grad()
def merge(backbone: "Backbone") -> None:
    """Replace W by W + (alpha / rank) B A in a backbone with adapters, in place; `backbone.merged` keeps the adapters.

    The old tensor W, which a momentum copy may share, is not changed."""
    model = backbone.model
    if not hasattr(model, "adapted"):
        return
    total = hashlib.sha256()
    hash_tensors(total, {name: x for name, x in model.state_dict().items() if not in_adapter(name)})
    about = {key: json.dumps(value) for key, value in asdict(model.adapted).items()} | {"base": total.hexdigest()}
    backbone.merged = Adapters({}, about)
    for name, layer in [(n, m) for n, m in model.named_modules() if hasattr(m, "lora")]:
        a, b = layer.lora.a.weight.detach(), layer.lora.b.weight.detach()
        backbone.merged.tensors.update({f"{name}.a": a, f"{name}.b": b})
        layer.weight = nn.Parameter(torch.add(layer.weight, b @ a, alpha=layer.lora.scale), layer.weight.requires_grad)
        del layer.forward, layer.lora
    del model.adapted
