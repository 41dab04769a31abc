"""PIRL learns equal vectors for an image and its shuffled patches, with a memory bank (Misra and van der Maaten 2020,
arXiv:1912.01991, section 2, with the jigsaw as pretext).

B images on this rank, n images in the training set, K negatives, D channels of the backbone, C channels of a stored
vector, views of S x S pixels, patches of P x P pixels."""

from collections.abc import Sequence

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.nce import estimate_Z, exp_similarity, nce
from eagleray.losses.products import unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.jigsaw import GRID, PATCHES, jigsaw
from eagleray.models.queue import Bank, draw_negatives


class PIRL(Method):
    """Contrastive learning with a memory bank of one vector per image.

    Two vectors of an image, that of the first view and that of nine shuffled patches of the second view, are trained to
    be more similar to the image's own row of the bank than to K random rows."""

    views = (2, 2)
    pooled_only = True
    bank: Bank | None  # None before `allocate`
    Z: Tensor  # () normalising constant of the probabilities; 0 until it is estimated from the first batch

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 128,
        temperature: PositiveFloat = 0.07,
        momentum: Share = 0.5,  # momentum of the bank's vectors
        negatives: PositiveInt = 32000,
        patch: PositiveInt = 64,  # side of a patch in pixels
        jigsaw_weight: Share = 0.5,  # lambda, weight of the patches' loss; the image's loss has the rest
    ) -> None:
        super().__init__()
        self.dim, self.temperature, self.momentum = dim, temperature, momentum
        self.negatives, self.patch, self.jigsaw_weight = negatives, patch, jigsaw_weight
        self.encoder = Encoder(backbone, nn.Linear(backbone.dim, dim))  # f of the paper
        self.patch_head = nn.Linear(backbone.dim, dim)  # g of the paper, for one patch
        self.jigsaw_head = nn.Linear(PATCHES * dim, dim)  # g of the paper, for all nine patches
        self.bank = None
        self.register_buffer("Z", torch.zeros(()))

    def check_views(self, views: Sequence[Tensor]) -> None:
        size = views[1].shape[3]
        if size // GRID < self.patch:
            raise UserError(
                f"views: the second view has {size} pixels, so a cell of the jigsaw has {size // GRID}; "
                f"expected at least {GRID * self.patch} pixels, or a smaller method.patch than {self.patch}"
            )

    def allocate(self, images: int) -> None:
        self.bank = Bank(images, self.dim)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        assert self.bank is not None, "no bank: allocate(images) must be called before the first step"
        x, x_t = batch.views
        n, i = len(self.bank.rows), batch.index  # (B,)
        f = unit(self.encoder([x]))  # (B, C)
        g = unit(self.encode_patches(jigsaw(x_t, self.patch, at.draw, batch.rows)))  # (B, C)

        others = draw_negatives(n, self.negatives, batch.rows, at.draw, f.device)  # (B, K)
        m = self.bank.rows[torch.cat([i.unsqueeze(1), others], 1)]  # (B, 1 + K, C)
        e_f, e_g = (exp_similarity(v, m, self.temperature) for v in (f, g))  # (B, 1 + K)
        self.Z.copy_(torch.where(self.Z > 0, self.Z, estimate_Z(e_g, n, batch.rows)))
        loss = self.jigsaw_weight * nce(e_g / self.Z, n) + (1 - self.jigsaw_weight) * nce(e_f / self.Z, n)
        self.seen = dist.gather(i, batch.rows), dist.gather(f, batch.rows)
        return {"loss": loss}

    def encode_patches(self, patches: Tensor) -> Tensor:
        """Return g (B, C) of the patches (B, 9, 3, P, P), whose vectors are concatenated in the given order."""
        v = self.patch_head(self.encoder.backbone.pooled(patches.flatten(0, 1)))  # (B * 9, C)
        g: Tensor = self.jigsaw_head(v.view(-1, PATCHES * self.dim))
        return g

    def after_step(self, at: Progress) -> None:
        assert self.bank is not None
        self.bank.move(*self.seen, self.momentum)

    def export(self) -> Backbone:
        return self.encoder.backbone
