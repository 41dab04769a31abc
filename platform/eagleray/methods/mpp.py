"""Masked patch prediction predicts the mean colours of patches that were masked or exchanged (Dosovitskiy et al. 2021,
arXiv:2010.11929, appendix B.1.2).

B images, N patches on a grid of h x w, n of them corrupted, D channels, C colours."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagleray.base.autocast import in_float32
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.patch_colours import LEVELS, corrupt, mean_colours
from eagleray.models.tokens import Hidden, drops_patches, maskable, take
from eagleray.views.colours import colours

MOST_CHANNELS = 5  # most channels that an image may have, which make 8**5 = 32,768 colours to predict


class MPP(Method):
    """The encoder sees all patches, some of them corrupted; a linear layer predicts the corrupted patches' colours."""

    views = (1, 1)
    mean: Tensor  # (3, 1, 1) pixel mean with which views are normalised
    std: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        corrupted: Annotated[float, Field(gt=0, le=1)] = 0.5,  # share of the patches that are corrupted
        masked: Share = 0.8,  # share of the corrupted patches that the mask token replaces
        exchanged: Share = 0.1,  # share of the corrupted patches that another patch replaces; the rest stay
    ) -> None:
        super().__init__()
        if not (maskable(backbone.model) and drops_patches(backbone.model)):
            raise UserError(
                f"backbone.name: {type(backbone.model).__name__} cannot hide patches for mpp, or has a layer after its "
                "pooling; expected a plain vision transformer of timm, such as vit_base_patch16_224"
            )
        if masked + exchanged > 1:
            raise UserError(f"method.masked={masked} method.exchanged={exchanged}: expected a sum of at most 1")
        if backbone.channels > MOST_CHANNELS:
            raise UserError(
                f"data.channels: {backbone.channels} channels of {LEVELS} levels make too many colours for mpp; "
                f"expected {MOST_CHANNELS} channels at most"
            )
        self.corrupted, self.masked, self.exchanged = corrupted, masked, exchanged
        self.encoder = Encoder(backbone, nn.Identity())
        self.mask_token = nn.Parameter(torch.zeros(1, backbone.dim))
        self.predictor = nn.Linear(backbone.dim, LEVELS**backbone.channels)
        for name, values in zip(("mean", "std"), colours(backbone.channels), strict=True):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        [x], backbone = batch.views, self.encoder.backbone
        grid = backbone.patch_grid(x)
        shares = self.corrupted, self.masked, self.exchanged
        drawn = corrupt(grid, shares, batch.rows, at.draw, x.device)
        f = backbone(x, Hidden(drawn.mask, self.mask_token, drawn.source))
        self.encoder.head(f.pooled)  # an identity, through which the run's monitor reads the features
        target = mean_colours(x, grid, self.mean, self.std)  # (B, N)
        scores = self.predictor(take(f.patches, drawn.places))  # (B, n, C)
        return {"loss": mpp_loss(scores, target.gather(1, drawn.places))}

    def check_views(self, views: Sequence[Tensor]) -> None:
        patches = math.prod(self.encoder.backbone.patch_grid(views[0]))
        corrupted = round(patches * self.corrupted)
        if patches < 2 or corrupted < 1:
            raise UserError(
                f"method.corrupted={self.corrupted}: corrupts {corrupted} of the {patches} patches of a view; expected "
                "at least one of at least two"
            )

    def export(self) -> Backbone:
        return self.encoder.backbone


@in_float32
def mpp_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of scores (B, n, C) for C colours with the target colours (B, n)."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())
