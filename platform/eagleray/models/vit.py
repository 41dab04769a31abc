"""The changes of MoCo v3 and MAE to a ViT for which timm has no argument.

They are batch norm before the MLPs, a convolutional stem, fixed positions and the initialisation of layers (Chen, Xie
and He 2021, arXiv:2104.02057; He et al. 2021, arXiv:2111.06377).
"""

import itertools
import math
from typing import Any

import torch
from timm.layers import PatchEmbed, build_sincos2d_pos_embed
from timm.models.vision_transformer import Block
from torch import Tensor, nn


class TokenBatchNorm(nn.Module):
    """Batch norm of tokens (B, ..., D), over images and tokens. timm gives a projection's norm a device and a dtype."""

    def __init__(self, dim: int, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, **settings)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.flatten(0, -2)).view_as(x)
        return out


class BatchNormBlock(Block):  # type: ignore[misc]
    """A block of ViT-BN (section 6.1), with batch norm before the MLP.

    The norms before attention and at the end of the network stay layer norms: with all of them replaced, training does
    not converge.
    """

    def __init__(self, dim: int, *args: Any, **settings: Any) -> None:
        super().__init__(dim, *args, **settings)
        self.norm2 = TokenBatchNorm(dim)


class ConvStem(PatchEmbed):  # type: ignore[misc]
    """Four 3x3 convolutions of stride 2 and a 1x1 convolution replace the patch projection.

    As in the authors' code, after Xiao et al. 2021, arXiv:2106.14881.
    """

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
# The arguments of timm's VisionTransformer by key and value of a recipe's backbone section.
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


def set_sincos(model: Any) -> None:
    """Set fixed 2-D sine-cosine positions, zero for the class token. Raises ValueError unless 4 divides the width."""
    if model.embed_dim % 4:
        raise ValueError(f"needs a width that is a multiple of 4, not {model.embed_dim}")
    grid = model.patch_embed.grid_size
    model.pos_embed = sincos(grid, model.embed_dim, prefix=model.pos_embed.shape[1] - grid[0] * grid[1])


def sincos(grid: tuple[int, int], dim: int, *, prefix: int) -> nn.Parameter:
    """Return fixed 2-D sine-cosine positions (1, prefix + N, dim) of a grid of N patches, zero for the prefix.

    They are MoCo v3's. Those of MAE have the halves of the channels swapped, the columns before the rows, which makes
    no difference to a network with random weights.
    """
    table = build_sincos2d_pos_embed(list(grid), dim, interleave_sin_cos=True)
    return nn.Parameter(torch.cat([torch.zeros(prefix, dim), table]).unsqueeze(0), requires_grad=False)


def init_patch(projection: nn.Conv2d) -> None:
    """Initialise the patch projection like a linear layer on flat patches, which timm's `moco` initialisation omits."""
    bound = math.sqrt(6 / (math.prod(projection.weight.shape[1:]) + projection.weight.shape[0]))
    nn.init.uniform_(projection.weight, -bound, bound)
    if projection.bias is not None:
        nn.init.zeros_(projection.bias)


def init_mae(module: nn.Module) -> None:
    """Initialise a ViT or blocks of one as MAE's authors do: linear layers after Glorot and Bengio, without treating
    query, key and value apart, the patch projection like a linear layer, tokens with a deviation of 0.02."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    for name, p in module.named_parameters():
        if name.endswith(("cls_token", "mask_token", "reg_token")):
            nn.init.normal_(p, std=0.02)
