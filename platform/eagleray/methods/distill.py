"""Distillation teaches a backbone a frozen teacher's features of the image and of each patch (Ranzinger et al. 2024,
arXiv:2312.06709, AM-RADIO, with one teacher).

B images, V views, D channels of the student, T channels of the teacher."""

from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from eagleray.base.errors import explained, reworded
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.losses.products import cosine, widen
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder, Features
from eagleray.models.network import Network


class Distill(Method):
    """Student and teacher see the same images. Two student heads predict the teacher's pooled vector and patches."""

    views = (1, 100)
    colours: Tensor  # (2, 3, 1, 1) factors and summands that turn pixels of our mean and std into the teacher's

    def __init__(
        self,
        backbone: Backbone,
        *,
        teacher: Network,  # teacher network and its weights
        hidden: PositiveInt = 2048,  # width of both heads
        patch_weight: Annotated[float, Field(ge=0)] = 1.0,
    ) -> None:
        super().__init__()
        self.patch_weight = patch_weight
        with reworded(("backbone.", "method.teacher.")):
            self.teacher = Backbone(**teacher.arguments).requires_grad_(False)
        widths = backbone.dim, hidden, self.teacher.dim
        self.student = Encoder(backbone, head(*widths))
        self.patch_head = head(*widths)
        self.register_buffer("colours", torch.tensor([1.0, 0.0]).view(2, 1, 1, 1).repeat(1, 3, 1, 1))

    def check_views(self, views: Sequence[Tensor]) -> None:
        for x in views:
            with explained(f"method.teacher.name: cannot take {x.shape[3]} pixel images", Exception):
                self.teacher(x)

    def train(self, mode: bool = True) -> "Distill":
        super().train(mode)
        self.teacher.eval()  # batch norm keeps the statistics of the teacher's training
        return self

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        factor, summand = self.colours
        pooled, patches = [], []
        for x in batch.views:
            s = self.student.backbone(x)
            with torch.no_grad():
                t = self.teacher(x * factor + summand)
            pooled.append(1 - cosine(self.student.head(s.pooled), t.pooled).mean())
            patches.append(match(self.patch_head(s.patches), on_grid(t, s.grid)))
        of_image, of_patches = torch.stack(pooled).mean(), torch.stack(patches).mean()
        return {"loss": of_image + self.patch_weight * of_patches, "pooled": of_image, "patch": of_patches}

    def export(self) -> Backbone:
        return self.student.backbone


def head(dim: int, hidden: int, out: int) -> nn.Sequential:
    """Return the adaptor, an MLP from the student's channels to the teacher's."""
    return nn.Sequential(nn.Linear(dim, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, out))


def on_grid(features: Features, grid: tuple[int, int]) -> Tensor:
    """Return the teacher's patches (B, N, T), resampled bilinearly if the student's `grid` is another one."""
    if features.grid == grid:
        return features.patches
    patches = features.patches.mT.unflatten(2, features.grid)
    return F.interpolate(patches, size=grid, mode="bilinear").flatten(2).mT


def match(s: Tensor, t: Tensor) -> Tensor:
    """Return the loss between predicted patches s and the teacher's patches t, both (B, N, T).

    It is 0.9 times one minus their cosine, plus 0.1 times their smooth L1 distance."""
    s, t = widen(s.flatten(0, 1)), widen(t.flatten(0, 1))
    return 0.9 * (1 - cosine(s, t).mean()) + 0.1 * F.smooth_l1_loss(s, t)
