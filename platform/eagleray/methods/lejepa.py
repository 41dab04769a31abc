"""LeJEPA predicts the mean embedding of large views and keeps embeddings Gaussian (Balestriero and LeCun 2025,
arXiv:2511.08544, algorithm 2).

B images, V views, C channels of the embedding."""

from collections.abc import Sequence

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from eagleray.base.autocast import in_float32
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.config.types import Share
from eagleray.data.batch import Batch
from eagleray.losses.sigreg import directions, sigreg
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.heads import mlp


class LeJEPA(Method):
    """One encoder sees all views, without a teacher, a predictor or a stopped gradient.

    The global views are the first views, those of the largest size."""

    views = (2, 100)
    pooled_only = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        embedding: PositiveInt = 512,  # width of a linear layer between the backbone and the projector
        hidden: PositiveInt = 2048,
        dim: PositiveInt = 512,
        weight: Share = 0.05,  # lambda, weight of SIGReg; the prediction has weight 1 - lambda
        slices: PositiveInt = 1024,  # number of random directions in a step
        # SIGReg compares characteristic functions up to this argument. The authors' code has 3, also for most of their
        # tables; the paper recommends 5.
        reach: PositiveFloat = 3.0,
    ) -> None:
        super().__init__()
        self.weight, self.slices, self.reach = weight, slices, reach
        projector = mlp([embedding, hidden, hidden, dim], norm=True, bias=True)
        self.encoder = Encoder(backbone, nn.Sequential(nn.Linear(backbone.dim, embedding), *projector))

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        z = self.encoder(batch.views).unflatten(0, (len(batch.views), -1))  # (V, B, C)
        a = directions(z.shape[2], self.slices, at.draw, z.device)  # (C, M)
        sim = prediction(z, global_views=sum(x.shape == batch.views[0].shape for x in batch.views))
        gaussian = sigreg(z, a, batch.rows, reach=self.reach)
        loss = (1 - self.weight) * sim + self.weight * gaussian
        return {"loss": loss, "prediction": sim, "sigreg": gaussian}

    def check_views(self, views: Sequence[Tensor]) -> None:
        sizes = [x.shape[3] for x in views]
        if sizes != sorted(sizes, reverse=True):
            raise UserError(f"views: sizes of {sizes} pixels; lejepa expects the largest, its global views, first")

    def export(self) -> Backbone:
        return self.encoder.backbone


@in_float32
def prediction(z: Tensor, global_views: int) -> Tensor:
    """Return the mean squared difference between embeddings z (V, B, C) and the mean of the first `global_views`.

    This is equation 7 as algorithm 2 has it, with a mean over channels instead of a sum."""
    return (z[:global_views].mean(0) - z).square().mean()
