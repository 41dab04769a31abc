"""Class attention: one token attends to the others, which do not attend to it (Touvron et al. 2021, arXiv:2103.17239).

The aggregation of SelfPatch (Yun et al. 2022, arXiv:2206.07990) is two such blocks, without LayerScale. n sets of N
patches, D channels, H heads."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone, Features
from eagleray.models.patch_neighbors import most_similar_neighbours


class Aggregation(nn.Module):
    """A learned token attends to a set of patches in two blocks; a layer norm follows."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise UserError(f"method.heads={heads}: expected a divisor of the backbone's {dim} channels")
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.ModuleList(_Block(dim, heads) for _ in range(2))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        nn.init.trunc_normal_(self.token, std=0.02)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return vectors (n, D) of n sets of patches x (n, N, D). Patches whose `mask` (n, N) is false are ignored."""
        token = self.token.expand(len(x), -1, -1)
        for block in self.blocks:
            token = block(token, x, mask)
        return self.norm(token.squeeze(1))

    def aggregate_neighbours(self, x: Tensor, grid: tuple[int, int], k: int, *, wrap: bool) -> Tensor:
        """Return, for each patch of x (B, N, D), the aggregate (B, N, D) of the k neighbours most similar to it."""
        index, mask = most_similar_neighbours(x, grid, k, wrap=wrap)  # (B, N, k)
        near = x[torch.arange(len(x), device=x.device).view(-1, 1, 1), index]  # (B, N, k, D)
        return self(near.flatten(0, 1), mask.flatten(0, 1)).view_as(x)


class _Block(nn.Module):
    """Attention of one token to patches, then an MLP on the token."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, token: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """Update the token (n, 1, D) from patches (n, N, D)."""
        u = self.norm1(torch.cat([token, x], 1))
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(u[:, :1]), self.k(u), self.v(u))
        )  # (n, H, 1 or 1 + N, D / H)
        # Not PyTorch's attention kernels, which limit the batch size: n is large, as every patch has a set of its own.
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (n, H, 1, 1 + N)
        if mask is not None:
            scores = scores.masked_fill(~F.pad(mask, (1, 0), value=True)[:, None, None], -torch.inf)
        token = token + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return token + self.mlp(self.norm2(token))


class AggregationBackbone(Backbone):
    """A backbone whose pooled vector is the aggregation of all its patches."""

    def __init__(self, backbone: Backbone, heads: int) -> None:
        nn.Module.__init__(self)  # Backbone's `__init__` would create another timm model
        self.model, self.micro_batch = backbone.model, backbone.micro_batch
        self.dim, self.channels = backbone.dim, backbone.channels
        self.aggregation = Aggregation(backbone.dim, heads)

    def _split(self, out: Tensor, images: Tensor) -> Features:
        features = super()._split(out, images)
        # Ranks wait for a gradient of every layer, also of one after the model's own pooling.
        return features._replace(pooled=self.aggregation(features.patches) + 0 * features.pooled)

    def _pooled(self, images: Tensor) -> Tensor:
        return self._features(images).pooled

    def pooled_sizes(self, images: Sequence[Tensor]) -> list[Tensor]:
        return [out.pooled for out in self.sizes(images)]
