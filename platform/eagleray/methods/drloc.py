"""DRLoc adds to supervised training the task of predicting the distance between two tokens (Liu et al. 2021,
arXiv:2106.03746, section 3).

The defaults are those of the authors' code; docs/decisions/0015-drloc-targets.md lists where their paper differs. B
images, V views, D channels, a grid of h x w tokens, C classes."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress, Schedule
from eagleray.config.types import Classes, Share
from eagleray.data.batch import Batch
from eagleray.losses.relative_location import (
    Localiser,
    Mode,
    Pool,
    Targets,
    drloc_loss,
    exhaustive_pairs,
    pool_grid,
    random_pairs,
)
from eagleray.methods.method import Classifier, classification_loss
from eagleray.models.backbone import Backbone
from eagleray.models.stages import Parts


class DRLoc(Classifier):
    """The loss is a classifier's cross-entropy plus lambda times the loss of an MLP that predicts offsets of tokens."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: Classes,
        smoothing: Share = 0.1,
        mixup: NonNegativeFloat = 0.8,
        cutmix: NonNegativeFloat = 1.0,
        ema: Share | None = None,  # decay of the averaged weights, which are exported and classify; None: no average
        pairs: PositiveInt = 64,  # m, number of token pairs per image
        # Lambda, the weight of the MLP's loss. In the paper it is constant: 0.5 for Swin, and 0.1 for T2T and CvT.
        weight: Schedule = Schedule(value=0.5, warmup=20, end=0.0, straight=True, per_epoch=True),
        mode: Mode = "l1",
        targets: Targets = "raw",  # targets of the modes l1 and l1_signed
        pairing: Literal["random", "exhaustive"] = "random",  # exhaustive: each token has one partner; m is not used
        # Grids with an MLP each. all: of all stages, like L_all in the code; blocks: of all blocks, as in the paper.
        stages: Literal["last", "all", "blocks"] = "last",
        # k, tokens on a side, which sets the number of offset classes. The last grid is pooled to a side below 2 k.
        grid: PositiveInt = 7,
        pool: Pool = "3x3",  # 2x2: as in the paper
    ) -> None:
        super().__init__(backbone, classes=classes, smoothing=smoothing, mixup=mixup, cutmix=cutmix, ema=ema)
        if stages != "last" and not mode.startswith("l1"):
            raise UserError(
                f"method.stages={stages}: grids differ in their number of offsets; expected mode=l1, got {mode}"
            )
        self.pairs, self.weight, self.mode, self.targets = pairs, weight, mode, targets
        self.pairing, self.grid, self.pool = pairing, grid, pool
        self.parts: Parts = "stages" if stages == "all" else stages
        offsets = None if mode.startswith("l1") else 2 * grid - 1 if mode.endswith("signed") else grid
        self.localisers = nn.ModuleList(Localiser(dim, offsets) for dim in backbone.dims(self.parts))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x, y = self.mixing(torch.cat(batch.views), batch.label.repeat(len(batch.views)))
        pooled, grids = self.encoder.backbone.grids(x, self.parts)
        z = self.encoder.head(pooled)  # (V * B, C)
        out = classification_loss(z, y, one_class=not self.mixing.on)
        if self.parts == "last":
            grids = [pool_grid(g, self.grid, self.pool) for g in grids]
        apart = [self.apart(f, g, batch, at) for f, g in zip(self.localisers, grids, strict=True)]
        drloc = torch.stack(apart).sum()
        return {**out, "loss": out["loss"] + self.weight(at) * drloc, "classes": out["loss"], "drloc": drloc}

    def apart(self, f: nn.Module, g: Tensor, batch: Batch, at: Progress) -> Tensor:
        """Return the loss of the localiser f for random or exhaustive pairs of tokens of a grid g (V * B, D, h, w)."""
        n, drawn = g.shape[2] * g.shape[3], (len(batch.views), batch.rows, at.draw, g.device)
        pairs = random_pairs(n, self.pairs, *drawn) if self.pairing == "random" else exhaustive_pairs(n, *drawn)
        assert isinstance(f, Localiser)
        return drloc_loss(f, g, pairs, mode=self.mode, targets=self.targets)

    def check_views(self, views: Sequence[Tensor]) -> None:
        super().check_views(views)
        backbone = self.encoder.backbone
        grids, dims = backbone.grids(views[0], self.parts)[1], backbone.dims(self.parts)
        if (channels := [g.shape[1] for g in grids]) != dims:
            raise UserError(f"backbone.name: its tokens have {channels} channels, and drloc expects {dims}")
        h, w = pool_grid(grids[-1], self.grid, self.pool).shape[2:]
        if not self.mode.startswith("l1") and max(h, w) > self.grid:
            raise UserError(
                f"method.grid={self.grid}: {h} x {w} tokens of a view of {views[0].shape[3]} pixels have more offsets "
                f"than mode={self.mode} has classes for; expected method.grid={max(h, w)}"
            )
