"""SimSiam predicts the other view's projection, and stops the projection's gradient (Chen and He 2021,
arXiv:2011.10566, algorithm 1).

B images, C channels."""

from pydantic import PositiveInt
from torch import Tensor, nn

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.losses.products import cosine
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.heads import mlp


class SimSiam(Method):
    """Each view predicts the projection of the other. There are no negatives and no momentum encoder."""

    views = (2, 2)
    pooled_only = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: PositiveInt = 2048,
        hidden: PositiveInt = 512,  # width of the predictor, which is a bottleneck
    ) -> None:
        super().__init__()
        # The projector is as wide as the backbone, as in the authors' code: 2048, the paper's number, for ResNet-50.
        widths = [backbone.dim, backbone.dim, backbone.dim, dim]
        self.encoder = Encoder(backbone, mlp(widths, norm=True, last_norm=True))
        self.predictor = nn.Sequential(
            nn.Linear(dim, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, dim),  # with a bias; batch norm here would make training unstable (table 3)
        )

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        z1, z2 = self.encoder.each(batch.views)  # (B, C)
        p1, p2 = self.predictor(z1), self.predictor(z2)  # (B, C)
        return {"loss": D(p1, z2) / 2 + D(p2, z1) / 2}

    def export(self) -> Backbone:
        return self.encoder.backbone


def D(p: Tensor, z: Tensor) -> Tensor:
    """Return equation 1: the mean negative cosine of predictions p and projections z (B, C); z gets no gradient."""
    return -cosine(p, z.detach()).mean()
