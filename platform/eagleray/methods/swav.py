"""SwAV predicts the prototypes that Sinkhorn-Knopp assigns to another view (Caron et al. 2020, arXiv:2006.09882,
algorithm 1).

B images on this rank, V views, K prototypes, C channels."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.config.types import Layers
from eagleray.data.batch import Batch
from eagleray.losses.entropy import entropy, usage
from eagleray.losses.products import inner, unit
from eagleray.losses.sinkhorn import sinkhorn
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.heads import drop_gradients, mlp
from eagleray.models.queue import Queue


class SwAV(Method):
    """The first two views, the full-resolution crops, are each assigned to prototypes that all other views predict."""

    views = (2, 100)
    pooled_only = True
    queues: Sequence[Queue]  # one queue for each full-resolution crop; empty without a queue

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        hidden: PositiveInt = 2048,
        layers: Layers = 2,  # linear layers in the projector; MoCo v3's study of ViTs has 3
        norm: bool = True,  # batch norm in the projector; MoCo v3's study of ViTs found none to be best
        prototypes: PositiveInt = 3000,
        temperature: PositiveFloat = 0.1,
        epsilon: PositiveFloat = 0.05,
        iterations: PositiveInt = 3,
        queue: NonNegativeInt = 0,  # features kept for each full-resolution crop; 0: no queue
        queue_start: float = 15.0,  # epochs before the queue begins to fill
        # First steps in which the prototypes are not trained: by default the paper's first epoch, at 4096 images a step
        freeze_prototypes: NonNegativeInt = 313,
    ) -> None:
        super().__init__()
        self.temperature, self.epsilon, self.iterations = temperature, epsilon, iterations
        self.queue, self.queue_start, self.freeze_prototypes = queue, queue_start, freeze_prototypes
        widths = [backbone.dim] + [hidden] * (layers - 1) + [dim]
        # As in the authors' code, linear layers before a batch norm have biases.
        self.encoder = Encoder(backbone, mlp(widths, norm=norm, bias=True))
        self.prototypes = nn.Linear(dim, prototypes, bias=False)
        self.queues = nn.ModuleList(Queue(dim, queue) for _ in range(2) if queue)  # type: ignore[assignment]

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        z = unit(self.encoder(batch.views))  # (V * B, C)
        s = inner(z, self.prototypes.weight).chunk(len(batch.views))  # V x (B, K)
        z1, z2 = z.chunk(len(batch.views))[:2]  # (B, C)
        q = [self.assign(0, z1, s[0], batch.rows, at), self.assign(1, z2, s[1], batch.rows, at)]  # 2 x (B, K)
        stats = {"entropy": entropy(torch.cat(q)), "usage": usage(torch.cat(q))}
        return {"loss": swapped_loss(q, s, self.temperature), **stats}

    @torch.no_grad()
    def assign(self, i: int, z: Tensor, s: Tensor, rows: tuple[int, ...], at: Progress) -> Tensor:
        """Return assignments (B, K) of the full-resolution crop i with features z (B, C) and scores s (B, K)."""
        scores = s
        if self.queue:
            # As in the authors' code, the queue begins to fill at `queue_start` and is used once it is full.
            if (at.step - self.queue_start * at.steps_per_epoch) * sum(rows) >= self.queue:
                # All ranks have the same queue, so each passes its own share to Sinkhorn, which sums over ranks.
                share = self.queues[i].keys[:, dist.rank() :: dist.size()].T
                scores = torch.cat([s, inner(share, self.prototypes.weight)])
            self.queues[i].push(dist.gather(z, rows))
        return sinkhorn(scores, self.epsilon, self.iterations)[: len(s)]

    def before_step(self, at: Progress) -> None:
        if at.step < self.freeze_prototypes:
            drop_gradients(self.prototypes)

    def export(self) -> Backbone:
        return self.encoder.backbone


def swapped_loss(q: Sequence[Tensor], s: Sequence[Tensor], tau: float) -> Tensor:
    """Return the mean cross-entropy H(q_i, softmax(s_v / tau)) over images and pairs of views i != v.

    q are the assignments (B, K) of the first views, s the scores (B, K) of all views."""
    log_p = [F.log_softmax(sv / tau, dim=1) for sv in s]
    loss = torch.zeros((), device=s[0].device)
    for i, qi in enumerate(q):
        others = [lv for v, lv in enumerate(log_p) if v != i]
        loss = loss - (qi * sum(others)).sum(1).mean()
    return loss / (len(q) * (len(s) - 1))
