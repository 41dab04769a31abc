"""PVT-Small, a pyramid vision transformer (Wang et al. 2021, arXiv:2102.12122, table 1), as EsViT trains it.

EsViT (Li et al. 2022, arXiv:2106.09785, table 4) trains a PVT of 24 M parameters, as many as this one has, and pools
every pyramid by the mean of its last tokens. So the class token, which PVT's paper adds in the last stage, is left out.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.twins import Block
from torch import Tensor, nn

from eagleray.models.pyramid import Pyramid, classifier, drop_rates, init

default_cfgs = generate_default_cfgs({"pvt_small": {}})


class PVT(Pyramid):
    """A PVT of several stages; each list has one entry per stage. B images, D channels, N = h * w tokens."""

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        img_size: int = 224,
        patches: Sequence[int] = (4, 2, 2, 2),
        dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (3, 4, 6, 3),
        heads: Sequence[int] = (1, 2, 5, 8),
        reductions: Sequence[int] = (8, 4, 2, 1),
        mlp_ratios: Sequence[int] = (8, 8, 4, 4),
        drop_path_rate: float = 0.0,
    ) -> None:
        """Build the stages, whose position tables are for images of `img_size` pixels.

        `reductions` are the factors by which each side of the grid of keys and values is smaller than the queries'."""
        super().__init__()
        self.dims, self.num_features = dims, dims[-1]
        rates = drop_rates(drop_path_rate, depths)
        stages, size = [], img_size
        for i, (before, dim) in enumerate(itertools.pairwise((3, *dims))):
            size //= patches[i]
            blocks = (
                Block(dim, heads[i], mlp_ratios[i], drop_path=rate, norm_layer=LayerNorm, sr_ratio=reductions[i], ws=1)
                for rate in rates[i]
            )
            stages.append(Stage(before, dim, patches[i], size, blocks))
        self.stages = nn.Sequential(*stages)
        self.norm = LayerNorm(dims[-1])  # timm's layer norm has the authors' eps, 1e-6
        self.head = classifier(dims[-1], num_classes)
        self.apply(init)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last tokens (B, h, w, D) of images (B, 3, H, W)."""
        return self.norm(self.stages(x).permute(0, 2, 3, 1))


class Stage(nn.Module):
    """A patch embedding with positions, then transformer blocks with spatial-reduction attention.

    The blocks are timm's global blocks of Twins (Chu et al. 2021, arXiv:2104.13840), which equal PVT's blocks."""

    def __init__(self, before: int, dim: int, patch: int, size: int, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(before, dim, patch, patch), nn.LayerNorm(dim)
        self.position = nn.Parameter(trunc_normal_(torch.empty(1, dim, size, size), std=0.02))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Turn the tokens of the previous stage, or the image, (B, D', H, W) into tokens (B, D, h, w)."""
        x = self.embed(x)
        size = x.shape[2:]
        x = self.norm(x.flatten(2).mT) + self.positions(size)
        for block in self.blocks:
            x = block(x, size)  # (B, N, D)
        return x.mT.unflatten(2, size)

    def positions(self, size: torch.Size) -> Tensor:
        """Return the position table (1, N, D), resampled bilinearly for a grid of another size, as the authors do."""
        same = size == self.position.shape[2:]
        table = self.position if same else F.interpolate(self.position, size, mode="bilinear")
        return table.flatten(2).mT


@register_model
def pvt_small(pretrained: bool = False, **options: Any) -> nn.Module:
    return build_model_with_cfg(PVT, "pvt_small", pretrained, kwargs_filter=("in_chans",), **options)
