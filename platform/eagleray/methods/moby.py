"""MoBY combines MoCo v2's queue with BYOL's predictor and momentum schedule (Xie et al. 2021, arXiv:2105.04553,
algorithm 1).

B images, C channels of a key."""

import math

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from eagleray.base import dist
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.infonce import infonce, logits
from eagleray.losses.products import unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp
from eagleray.models.queue import Queue


class MoBY(Method):
    """Each view gives queries and keys, and has a queue of its own keys. Only the online network uses drop path."""

    views = (2, 2)
    pooled_only = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 256,
        hidden: PositiveInt = 4096,
        temperature: PositiveFloat = 0.2,
        queue: PositiveInt = 4096,
        momentum: Schedule = Schedule(value=0.99, end=1.0),
    ) -> None:
        super().__init__()
        self.temperature, self.momentum = temperature, momentum
        # As in the authors' code, linear layers before a batch norm have biases.
        self.online = Encoder(backbone, mlp([backbone.dim, hidden, dim], norm=True, bias=True))
        self.predictor = mlp([dim, hidden, dim], norm=True, bias=True)
        self.target = ema_copy(self.online)
        self.queue1, self.queue2 = Queue(dim, queue), Queue(dim, queue)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        # The heads run once per view, as their batch norm must not mix views.
        q1, q2 = (unit(self.predictor(z)) for z in self.online.each(batch.views))  # (B, C)
        with torch.no_grad():
            # The momentum depends only on the step, so a restart continues it; in the authors' code it starts anew.
            ema_update(self.target, self.online, self.momentum(at))
            k1, k2 = (unit(z) for z in self.target.each(batch.views))  # (B, C)
        l1 = infonce(logits(q1, k2, self.queue2.keys, self.temperature))
        l2 = infonce(logits(q2, k1, self.queue1.keys, self.temperature))
        self.queue1.push(dist.gather(k1, batch.rows))
        self.queue2.push(dist.gather(k2, batch.rows))
        return {"loss": l1 + l2, "gain": math.log(1 + self.queue1.keys.shape[1]) - (l1 + l2) / 2}

    def export(self) -> Backbone:
        return self.online.backbone
