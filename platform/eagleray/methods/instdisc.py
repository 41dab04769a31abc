"""InstDisc treats every image as a class of its own, with a memory bank of features (Wu et al. 2018).

arXiv:1805.01978. B images on this rank, n in the training set, K negatives, C channels.
"""

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.autocast import in_float32
from eagleray.base.rng import step_generator
from eagleray.config.schedule import Progress
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.products import inner, unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.queue import Bank


class InstDisc(Method):
    """One view is compared with the vectors that a bank keeps of its own image and of others."""

    views = (1, 1)
    bank: Bank | None  # None before `allocate`
    Z: Tensor  # () normalising constant of P; 0 until it is estimated from the first batch

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        temperature: PositiveFloat = 0.07,
        momentum: Share = 0.5,  # of a vector in the bank; the paper replaces the vector (0), the released code does not
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
        # Not in `forward`: the gradient of a softmax over all images needs the bank as it was.
        assert self.bank is not None
        i, v = self.seen
        self.bank.write(i, update_memory(self.bank.rows[i], v, self.momentum))

    def export(self) -> Backbone:
        return self.encoder.backbone


def draw_negatives(n: int, negatives: int, rows: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Draw K negatives (B, K) for each row of this rank, uniformly over all n images.

    A row's own image may be among them, as in the released code. The draw is for the rows of all ranks and depends on
    the seed alone, so it is the same for any number of ranks and after a restart.
    """
    drawn = torch.randint(n, (sum(rows), negatives), generator=step_generator(seed, device), device=device)
    return drawn[dist.offset(rows) :][: rows[dist.rank()]]


@in_float32  # of the temperature 0.07, which would enlarge a rounding 14 times
def exp_similarity(v: Tensor, w: Tensor, tau: float) -> Tensor:
    """Return exp(v w / tau) (B, 1 + K) of v (B, C) and the bank's w (B, 1 + K, C): P of equation 4 without its Z."""
    return torch.exp(torch.einsum("bc,bkc->bk", v, w) / tau)


def estimate_Z(e: Tensor, n: int, rows: tuple[int, ...]) -> Tensor:
    """Estimate Z by equation 8 from e (B, 1 + K), the similarities of all ranks' rows with some of the n images."""
    return n * dist.total(e.sum()) / (sum(rows) * e.shape[1])


def nce(P: Tensor, n: int) -> Tensor:
    """Return equation 7: the noise-contrastive loss of P (B, 1 + K), the positive first, with uniform noise."""
    noise = (P.shape[1] - 1) / n
    real, false = P[:, 0], P[:, 1:]
    eps = 1e-7  # the released code's
    loss = torch.log(real / (real + noise + eps)) + torch.log(noise / (false + noise + eps)).sum(1)
    return -loss.mean()


def proximal_term(v: Tensor, old: Tensor) -> Tensor:
    """Return equation 10: the mean squared distance of v (B, C) from the bank's vectors of the same images."""
    return (v - old).square().sum(1).mean()


def update_memory(old: Tensor, v: Tensor, momentum: float) -> Tensor:
    """Return the vectors (B, C) that replace the old ones in the bank."""
    return F.normalize(momentum * old + (1 - momentum) * v, dim=1)
