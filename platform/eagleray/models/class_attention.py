"""Class attention: a token reads others and is not read by them (Touvron et al. 2021, arXiv:2103.17239, section 3). The
aggregation of SelfPatch (Yun et al. 2022, arXiv:2206.07990) is two such blocks, without LayerScale."""

import math

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone, Features
from eagleray.models.patch_neighbors import most_similar_neighbours


class Aggregation(nn.Module):
    """A learnt token that reads a set of patches in two blocks, and a layer norm."""

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

    def forward(self, x: Tensor, there: Tensor | None = None) -> Tensor:
        """Sets of patches (n, N, D) to a vector for each (n, D); `there` (n, N) says which patches count."""
        token = self.token.expand(len(x), -1, -1)
        for block in self.blocks:
            token = block(token, x, there)
        out: Tensor = self.norm(token.squeeze(1))
        return out

    def aggregate_neighbours(self, x: Tensor, grid: tuple[int, int], k: int, *, wrap: bool) -> Tensor:
        """For each patch of x (B, N, D) what its k likest neighbours make together, without itself: (B, N, D)."""
        place, there = most_similar_neighbours(x, grid, k, wrap=wrap)  # (B, N, k)
        near = x[torch.arange(len(x), device=x.device).view(-1, 1, 1), place]  # (B, N, k, D)
        return self(near.flatten(0, 1), there.flatten(0, 1)).view_as(x)


class _Block(nn.Module):
    """Attention of one token, then an MLP of it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, token: Tensor, x: Tensor, there: Tensor | None) -> Tensor:
        """Token (n, 1, D) and patches (n, N, D) to the token (n, 1, D)."""
        u = self.norm1(torch.cat([token, x], 1))
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(u[:, :1]), self.k(u), self.v(u))
        )  # (n, H, 1 or 1 + N, D / H)
        # Not PyTorch's attention, whose kernels take fewer sets at once than a batch has patches.
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (n, H, 1, 1 + N)
        if there is not None:
            scores = scores.masked_fill(~F.pad(there, (1, 0), value=True)[:, None, None], -torch.inf)
        token = token + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        out: Tensor = token + self.mlp(self.norm2(token))
        return out


class AggregationBackbone(Backbone):
    """A backbone whose pooled vector is what an aggregation makes of all its patches; these stay as they are."""

    def __init__(self, backbone: Backbone, heads: int) -> None:
        nn.Module.__init__(self)  # not another timm model
        self.model, self.dim, self.micro_batch = backbone.model, backbone.dim, backbone.micro_batch
        self.aggregation = Aggregation(backbone.dim, heads)

    def _features(self, images: Tensor) -> Features:
        out = super()._features(images)
        return out._replace(pooled=self.aggregation(out.patches))

    def _pooled(self, images: Tensor) -> Tensor:
        return self._features(images).pooled
