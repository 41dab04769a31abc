"""InstDisc treats every image as a class of its own, with a memory bank of features (Wu et al. 2018, arXiv:1805.01978).

B images on this rank, n images in the training set, K negatives, C channels."""

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.config.schedule import Progress
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.nce import estimate_Z, exp_similarity, nce
from eagleray.losses.products import inner, unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.queue import Bank, draw_negatives


class InstDisc(Method):
    """A view's vector is compared with the bank's vectors of the same image (positive) and of other images."""

    views = (1, 1)
    pooled_only = True
    bank: Bank | None  # None before `allocate`
    Z: Tensor  # () normalising constant of the probabilities; 0 until it is estimated from the first batch

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        temperature: PositiveFloat = 0.07,
        momentum: Share = 0.5,  # momentum of the bank; 0 in the paper, which replaces the vectors
        negatives: NonNegativeInt = 4096,  # 0: a softmax over all images
        proximal: float = 0.0,  # lambda of equation 10, which the released code does not have
    ) -> None:
        super().__init__()
        self.dim, self.temperature, self.momentum = dim, temperature, momentum
        self.negatives, self.proximal = negatives, proximal
        self.encoder = Encoder(backbone, nn.Linear(backbone.dim, dim))
        self.bank = None
        self.register_buffer("Z", torch.zeros(()))

    def allocate(self, images: int) -> None:
        self.bank = Bank(images, self.dim)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        assert self.bank is not None, "no bank: allocate(images) must be called before the first step"
        memory, n = self.bank.rows, len(self.bank.rows)  # (n, C)
        i, v = batch.index, unit(self.encoder(batch.views))  # (B,), (B, C)
        if self.negatives:
            others = draw_negatives(n, self.negatives, batch.rows, at.draw, v.device)  # (B, K)
            e = exp_similarity(v, memory[torch.cat([i.unsqueeze(1), others], 1)], self.temperature)  # (B, 1 + K)
            self.Z.copy_(torch.where(self.Z > 0, self.Z, estimate_Z(e, n, batch.rows)))
            loss = nce(e / self.Z, n)
        else:
            logits = inner(v, memory) / self.temperature  # (B, n)
            loss = F.cross_entropy(logits, i)
        if self.proximal:
            loss = loss + self.proximal * proximal_term(v, memory[i])
        self.seen = dist.gather(i, batch.rows), dist.gather(v, batch.rows)
        return {"loss": loss}

    def after_step(self, at: Progress) -> None:
        # The bank is updated here, not in `forward`: the gradient of a softmax over all images needs the old rows.
        assert self.bank is not None
        i, v = self.seen
        self.bank.move(i, v, self.momentum)

    def export(self) -> Backbone:
        return self.encoder.backbone


def proximal_term(v: Tensor, old: Tensor) -> Tensor:
    """Return equation 10: the mean squared distance of v (B, C) from the bank's vectors of the same images."""
    return (v - old).square().sum(1).mean()
