"""PixPro makes smoothed patches agree with the patches at the same place in the other view (Xie et al. 2020,
arXiv:2011.10043, section 3.2).

B images, N = h * w patches, D channels of the backbone, C channels of a projection."""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base.autocast import in_float32
from eagleray.config.schedule import Progress, Schedule
from eagleray.data.batch import Batch
from eagleray.losses.places import apart, centres
from eagleray.losses.products import cosine, unit
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder, Features
from eagleray.models.ema import ema_copy, ema_update
from eagleray.models.heads import mlp


class PixPro(Method):
    """The loss is the pixel-to-propagation consistency of two views, plus `instance_weight` times BYOL's loss."""

    views = (2, 2)
    needs_boxes = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 256,
        hidden: PositiveInt = 4096,
        sharpness: Annotated[float, Field(ge=1)] = 2.0,  # the exponent gamma of similarities
        distance: PositiveFloat = 0.7,  # largest distance of a pair's centres, in diagonals of the larger patch
        momentum: Schedule = Schedule(value=0.99, end=1.0),
        instance_weight: NonNegativeFloat = 0.0,  # the weight of the loss of whole images; 0: no heads for it
    ) -> None:
        super().__init__()
        self.sharpness, self.distance, self.momentum = sharpness, distance, momentum
        self.instance_weight = instance_weight
        self.online = _Encoder(backbone, dim, hidden, instances=instance_weight > 0)
        self.target = ema_copy(self.online)
        self.transform = nn.Linear(dim, dim)  # g of the paper
        self.predictor = _PatchMLP(dim, hidden, dim) if instance_weight else None

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        f1, f2 = self.online.features(batch.views)
        x1, x2 = self.online.patch_head(f1.patches), self.online.patch_head(f2.patches)  # (B, N, C)
        y1, y2 = (propagate(x, self.transform(x), self.sharpness) for x in (x1, x2))
        with torch.no_grad():
            # The update comes before the targets, as in the authors' code, so they use the weights after the last step.
            ema_update(self.target, self.online, self.momentum(at))
            g1, g2 = self.target.features(batch.views)
            t1, t2 = self.target.patch_head(g1.patches), self.target.patch_head(g2.patches)
        assert batch.boxes is not None, "the loader fills them in for a method that needs them"
        pairs = near(batch.boxes, (f1.grid, f2.grid), self.distance)  # (B, N, N)
        # Ranks wait for a gradient of every layer, also of one after the pooling, such as ConvNeXt's norm.
        pixel = consistency(y1, t2, pairs) + consistency(y2, t1, pairs.mT) + 0 * (f1.pooled + f2.pooled).mean()
        if self.predictor is None:
            return {"loss": pixel}
        # As in the authors' code, heads act on each patch, and their outputs are averaged.
        p1, p2 = (self.predictor(self.online.instance_head(f.patches)).mean(1) for f in (f1, f2))  # (B, C)
        with torch.no_grad():
            z1, z2 = (self.target.instance_head(g.patches).mean(1) for g in (g1, g2))
        instance = -2 * (cosine(p1, z2).mean() + cosine(p2, z1).mean())
        return {"loss": pixel + self.instance_weight * instance, "pixel": pixel, "instance": instance}

    def export(self) -> Backbone:
        return self.online.backbone


class _PatchMLP(nn.Module):
    """Two linear layers for every patch, with batch norm over all patches of the batch."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.mlp = mlp([inputs, hidden, outputs], norm=True, bias=True)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.mlp(patches.flatten(0, 1))
        return out.unflatten(0, patches.shape[:2])


class _Encoder(Encoder[nn.Identity]):
    """A backbone with a head for its patches and, for the loss of whole images, a second head."""

    def __init__(self, backbone: Backbone, dim: int, hidden: int, *, instances: bool) -> None:
        super().__init__(backbone, nn.Identity())
        self.patch_head = _PatchMLP(backbone.dim, hidden, dim)
        self.instance_head = _PatchMLP(backbone.dim, hidden, dim) if instances else nn.Identity()

    def features(self, views: Sequence[Tensor]) -> list[Features]:
        """Return the features of each view."""
        out = self.backbone.each(views)
        for f in out:
            self.head(f.pooled)  # an identity, through which the run's monitor reads the features
        return out


@in_float32
def propagate(x: Tensor, g: Tensor, sharpness: float) -> Tensor:
    """Return the smoothed patches y (B, N, C) of patches x and their transforms g, both (B, N, C).

    y_i is the sum of the unit vectors g_j with the weights max(cos(x_i, x_j), 0) ** sharpness."""
    x = unit(x)
    return (x @ x.mT).clamp(min=0) ** sharpness @ unit(g)


@in_float32
def consistency(y: Tensor, t: Tensor, pairs: Tensor) -> Tensor:
    """Return minus twice the mean cosine of an image's pairs of patches, averaged over images.

    y (B, N, C) and t (B, M, C) are patches of two views. `pairs` (B, N, M) is 1 where two patches form a pair, else 0.
    An image without pairs counts as 0. The factor 2 is that of the authors' code."""
    cosines = unit(y) @ unit(t).mT
    return -2 * ((cosines * pairs).sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)).mean()


def near(boxes: Tensor, grids: tuple[tuple[int, int], tuple[int, int]], distance: float) -> Tensor:
    """Return a matrix (B, N, M), the paper's A: 1 if the centres of two views' patches are closer in the image than
    `distance` times the diagonal of the larger patch, else 0. `boxes` (2, B, 4) and `grids` are those of the views.

    Coordinates are shares of the image's width and height, as in the authors' code, whatever its aspect ratio."""
    (c1, diagonal1), (c2, diagonal2) = map(centres, boxes, grids)
    far = apart(c1, c2)
    return (far < distance * torch.maximum(diagonal1, diagonal2)[:, None, None]).to(far.dtype)
