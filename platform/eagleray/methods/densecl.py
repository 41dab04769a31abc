"""DenseCL contrasts every patch with its most similar patch in the other view (Wang et al. 2020, arXiv:2011.09157,
equations 2 to 4).

B images, N patches, D channels of the backbone, C channels of a key."""

import math

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.losses.products import unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.batch_norm import group_batch_norms, shuffle
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp
from eagleray.models.queue import Queue


class DenseCL(Method):
    """MoCo v2 on the pooled vector and, with a second head and a second queue, on every patch."""

    views = (2, 2)

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        hidden: PositiveInt = 2048,
        temperature: PositiveFloat = 0.2,
        queue: PositiveInt = 65536,
        momentum: Schedule = Schedule(value=0.999),
        dense_weight: Share = 0.5,  # weight of the patches' loss; the pooled vectors' loss has the rest
        norm_group: PositiveInt | None = None,  # images normalised together by batch norm (paper: a GPU's); None: all
    ) -> None:
        super().__init__()
        self.temperature, self.momentum, self.norm_group = temperature, momentum, norm_group
        self.dense_weight = dense_weight
        self.f_q = _Encoder(backbone, *(mlp([backbone.dim, hidden, dim], norm=False) for _ in range(2)))
        group_batch_norms(self.f_q, norm_group)
        self.f_k = ema_copy(self.f_q)
        self.queue, self.dense_queue = Queue(dim, queue), Queue(dim, queue)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x1, x2 = batch.views
        q, s, f = self.f_q.encode(x1)  # (B, C), (B, N, C), (B, N, D)
        with torch.no_grad():
            ema_update(self.f_k, self.f_q, self.momentum(at))
            x2, unshuffle = shuffle(x2, batch.rows, self.norm_group, seed=at.draw)
            k, t, g = map(unshuffle, self.f_k.encode(x2))  # (B, C), (B, N, C), (B, N, D)
            k, t, mean = unit(k), unit(match_keys(t, f, g)), unit(t.mean(1))
        scores = logits(unit(q), k, self.queue.keys, self.temperature)
        dense = logits(unit(s).flatten(0, 1), t.flatten(0, 1), self.dense_queue.keys, self.temperature)
        self.queue.push(dist.gather(k, batch.rows))
        self.dense_queue.push(dist.gather(mean, batch.rows))
        loss = (1 - self.dense_weight) * infonce(scores) + self.dense_weight * infonce(dense)
        return {"loss": loss, "gain": math.log(dense.shape[1]) - loss}

    def export(self) -> Backbone:
        return self.f_q.backbone


class _Encoder(Encoder[nn.Sequential]):
    """An encoder with a second head, for the patches."""

    def __init__(self, backbone: Backbone, head: nn.Sequential, dense_head: nn.Sequential) -> None:
        super().__init__(backbone, head)
        self.dense_head = dense_head

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project images (B, 3, H, W) to (B, C) and their patches to (B, N, C); return the patches (B, N, D) too."""
        out = self.backbone(images)
        return self.head(out.pooled), self.dense_head(out.patches), out.patches


def match_keys(t: Tensor, f: Tensor, g: Tensor) -> Tensor:
    """Return, for every patch of f (B, N, D), the key in t (B, N, C) of the most similar patch of g (B, N, D)."""
    # The nearest unit vector has the largest cosine. Distances are used, as autocast keeps them in float32, while it
    # would round cosines to 16 bits, in which neighbours hardly differ.
    nearest = torch.cdist(unit(f), unit(g)).argmin(2, keepdim=True)  # (B, N, 1)
    return t.take_along_dim(nearest, 1)
