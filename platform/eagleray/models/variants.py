"""Changes to networks for which timm has no argument: those of MoCo v3 and MAE to a ViT, and the stem of wide ResNets.

A ViT gets batch norm before the MLPs, a convolutional stem, other positions or another initialisation (Chen, Xie and He
2021, arXiv:2104.02057; He et al. 2021, arXiv:2111.06377). The stem of a wide ResNet is widened by the same factor as
its stages, as in SimCLR, BYOL and SwAV: timm's argument `channels` widens the stages, but leaves 64 in the stem."""

import itertools
import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, build_sincos2d_pos_embed
from timm.models.resnet import Bottleneck, ResNet
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from eagleray.base.errors import UserError


class TokenBatchNorm(nn.Module):
    """Batch norm of tokens (B, ..., D), over images and tokens. `settings` are timm's device and dtype for norms."""

    def __init__(self, dim: int, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view_as(x)


class BatchNormBlock(Block):  # type: ignore[misc]
    """A block of MoCo v3's ViT-BN (section 6.1), with batch norm before the MLP.

    The norms before attention and at the end of the network stay layer norms: with all of them replaced, training does
    not converge."""

    def __init__(self, dim: int, *args: Any, **settings: Any) -> None:
        super().__init__(dim, *args, **settings)
        self.norm2 = TokenBatchNorm(dim)


class ConvStem(PatchEmbed):  # type: ignore[misc]
    """Four 3x3 convolutions of stride 2 and a 1x1 convolution replace the patch projection, as in MoCo v3's code, after
    Xiao et al. 2021, arXiv:2106.14881."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.patch_size != (16, 16):
            raise ValueError(f"backbone.stem=conv makes patches of 16 pixels, not {self.patch_size[0]}")
        dim, colours = self.proj.out_channels, self.proj.in_channels
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise([colours, dim // 8, dim // 4, dim // 2, dim]):
            layers += [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.proj = nn.Sequential(*layers, nn.Conv2d(dim, dim, 1))  # type: ignore[assignment]


MEAN = {"class_token": False, "global_pool": "avg", "fc_norm": False}
# Arguments of timm's VisionTransformer for each key and value in a recipe's backbone section.
ARGUMENTS: dict[tuple[str, str], dict[str, Any]] = {
    ("init", "moco"): {"weight_init": "moco"},
    ("init", "mae"): {"weight_init": "moco"},  # `init_mae` replaces these weights
    ("position", "none"): {"pos_embed": "none"},
    ("pool", "mean"): {**MEAN, "final_norm": False},
    ("pool", "norm_mean"): {**MEAN, "final_norm": True},
    ("norm", "batch"): {"block_fn": BatchNormBlock},
    ("stem", "conv"): {"embed_layer": ConvStem},
    ("patch_norm", "batch"): {"embed_norm_layer": TokenBatchNorm},
    ("patch_norm", "weight"): {"embed_norm_layer": None},  # `Backbone` normalises the weights
}


def set_position(model: Any, name: str, position: str) -> None:
    """Give a ViT fixed 2-D sine-cosine positions (`sincos`), or resample its position table as DINO does (`dino`).

    Raises UserError for a model without a position table, and for prefix tokens or a width that do not fit."""
    if getattr(model, "pos_embed", None) is None:
        raise UserError(f"backbone.position={position}: {name} has no position table")
    if position == "dino":
        if model.num_prefix_tokens != (model.cls_token is not None):
            raise UserError(f"backbone.position=dino: {name} has prefix tokens other than a class token")
        model._pos_embed = types.MethodType(_dino_position, model)
        return
    if model.embed_dim % 4:
        raise UserError(
            f"backbone.position=sincos: {name} needs a width that is a multiple of 4, not {model.embed_dim}"
        )
    grid = model.patch_embed.grid_size
    model.pos_embed = sincos(grid, model.embed_dim, prefix=model.pos_embed.shape[1] - grid[0] * grid[1])


def _dino_position(self: Any, x: Tensor) -> Tensor:
    """Add positions to patches (B, h, w, D) as DINO does, and return tokens (B, P + h * w, D).

    P is 1 with a class token and 0 without."""
    table = resample(self.pos_embed, self.patch_embed.grid_size, (x.shape[1], x.shape[2]))
    tokens = x.flatten(1, 2)
    if self.cls_token is not None:
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1)
    return self.pos_drop(tokens + table)


def bicubic(grid: Tensor, scale: list[float]) -> Tensor:
    """Resample a grid (1, D, h, w) bicubically; `scale` has the factors of h and w."""
    if grid.is_cpu or not torch.are_deterministic_algorithms_enabled():
        return F.interpolate(grid, scale_factor=scale, mode="bicubic")
    # On a GPU, the gradient of F.interpolate is summed in no fixed order, unlike that of an equal matrix product.
    h, w = grid.shape[2:]
    each = F.interpolate(torch.eye(h * w, device=grid.device).view(-1, 1, h, w), scale_factor=scale, mode="bicubic")
    with torch.autocast(grid.device.type, enabled=False):
        return (grid.flatten(2) @ each.flatten(1).to(grid.dtype)).unflatten(2, each.shape[2:])


def resample(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resample a position table (1, P + N, D) to another grid, bicubic without antialiasing; the first P rows stay.

    DINO adds 0.1 to the size of the grid to avoid rounding errors. That moves the sampling points, and DINO's weights
    were trained with the moved points."""
    if new == old:
        return table
    prefix = table.shape[1] - old[0] * old[1]
    grid = table[:, prefix:].unflatten(1, old).permute(0, 3, 1, 2)
    scale = [(n + 0.1) / o for n, o in zip(new, old, strict=True)]
    grid = bicubic(grid, scale)
    return torch.cat([table[:, :prefix], grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)


def sincos(grid: tuple[int, int], dim: int, *, prefix: int) -> nn.Parameter:
    """Return fixed 2-D sine-cosine positions (1, prefix + N, dim) of a grid of N patches, zero for the prefix.

    They are MoCo v3's. MAE swaps the half of the channels for rows with the half for columns, which makes no difference
    to a network with random weights."""
    table = build_sincos2d_pos_embed(list(grid), dim, interleave_sin_cos=True)
    return nn.Parameter(torch.cat([torch.zeros(prefix, dim), table]).unsqueeze(0), requires_grad=False)


def init_patch(projection: nn.Conv2d) -> None:
    """Initialise the patch projection like a linear layer on flat patches, which timm's `moco` initialisation omits."""
    bound = math.sqrt(6 / (math.prod(projection.weight.shape[1:]) + projection.weight.shape[0]))
    nn.init.uniform_(projection.weight, -bound, bound)
    if projection.bias is not None:
        nn.init.zeros_(projection.bias)


def init_mae(module: nn.Module) -> None:
    """Initialise a ViT, or blocks of one, as MAE's authors do.

    Linear layers are initialised after Glorot and Bengio, query, key and value as one layer, the patch projection like
    a linear layer, and tokens with a standard deviation of 0.02."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    for name, p in module.named_parameters():
        if name.endswith(("cls_token", "mask_token", "reg_token")):
            nn.init.normal_(p, std=0.02)


def widen_stem(model: Any, name: str) -> None:
    """Give a ResNet a stem of as many channels as its first stage has between its 1x1 convolutions, in place.

    Raises UserError for a model other than a ResNet of bottleneck blocks whose stem is one convolution."""
    if not has_plain_stem(model):
        raise UserError(f"backbone.stem=wide: {name} is no ResNet of bottleneck blocks after one convolution")
    first = model.layer1[0]
    width = first.conv1.out_channels
    model.conv1, model.bn1 = convolution(model.conv1, outputs=width), type(model.bn1)(width)
    first.conv1 = convolution(first.conv1, inputs=width)
    first.downsample[0] = convolution(first.downsample[0], inputs=width)
    model.feature_info[0]["num_chs"] = width


def has_plain_stem(model: Any) -> bool:
    """Return whether a model is a ResNet of bottleneck blocks after one convolution."""
    blocks: Any = getattr(model, "layer1", None)
    return isinstance(model, ResNet) and isinstance(blocks[0], Bottleneck) and isinstance(model.conv1, nn.Conv2d)


def convolution(old: nn.Conv2d, *, inputs: int | None = None, outputs: int | None = None) -> nn.Conv2d:
    """Return a convolution like `old` with other channels, initialised as timm's ResNets are."""
    new = nn.Conv2d(
        inputs or old.in_channels,
        outputs or old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        bias=False,
    )
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    return new
