"""MoCo finds the key of an image among a queue of keys from earlier batches (He et al. 2019, arXiv:1911.05722,
algorithm 1; v2: Chen et al. 2020, arXiv:2003.04297; v2+, with both directions: Chen and He 2020, arXiv:2011.10566).

B images, C channels of a key, K keys in a queue."""

import math

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.losses.products import unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.batch_norm import group_batch_norms, shuffle
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp
from eagleray.models.queue import Queue


class MoCo(Method):
    """Queries come from one view and keys from the other; the keys of earlier batches are the negatives."""

    views = (2, 2)
    pooled_only = True
    queues: list[Queue]

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        hidden: PositiveInt | None = 2048,  # None: the head is one linear layer (v1)
        temperature: PositiveFloat = 0.2,
        queue: PositiveInt = 65536,
        momentum: Schedule = Schedule(value=0.999),
        symmetric: bool = False,  # v2+: each view gives queries and keys, with one queue for each direction
        norm_group: PositiveInt | None = None,  # images normalised together by batch norm (paper: a GPU's); None: all
    ) -> None:
        super().__init__()
        self.temperature, self.momentum, self.symmetric, self.norm_group = temperature, momentum, symmetric, norm_group
        self.f_q = Encoder(backbone, mlp([backbone.dim, *([hidden] if hidden else []), dim], norm=False))
        group_batch_norms(self.f_q, norm_group)
        self.f_k = ema_copy(self.f_q)
        self.queues = nn.ModuleList(Queue(dim, queue) for _ in range(1 + symmetric))  # type: ignore[assignment]

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x1, x2 = batch.views
        pairs = [(x1, x2), (x2, x1)] if self.symmetric else [(x1, x2)]
        q = [unit(self.f_q([x])) for x, _ in pairs]  # (B, C)
        with torch.no_grad():
            # The update comes here, as in the authors' code, not after the optimiser's step, as in algorithm 1; keys
            # are computed with the same weights in both cases.
            ema_update(self.f_k, self.f_q, self.momentum(at))
            k = [self.keys(x, batch, at) for _, x in pairs]  # (B, C)
        scores = [logits(*qkn, self.temperature) for qkn in zip(q, k, [n.keys for n in self.queues], strict=True)]
        for queue, keys in zip(self.queues, k, strict=True):
            queue.push(dist.gather(keys, batch.rows))
        # The losses of both directions are summed, as in solo-learn: their mean would halve the gradient.
        loss = torch.stack([infonce(s) for s in scores]).sum()
        return {"loss": loss, "gain": math.log(scores[0].shape[1]) - loss / len(scores)}

    def keys(self, x: Tensor, batch: Batch, at: Progress) -> Tensor:
        """Return the unit keys (B, C) of a view. With `norm_group`, the encoder sees its images in a shuffled order."""
        x, unshuffle = shuffle(x, batch.rows, self.norm_group, seed=at.draw)
        return unshuffle(unit(self.f_k([x])))

    def export(self) -> Backbone:
        return self.f_q.backbone
