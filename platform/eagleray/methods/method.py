"""What every method is, and what those have in common that learn from labels."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import average, ema_copy
from eagleray.views.mixing import Mixing


class Method(nn.Module):
    """Views in, a loss out. All state is parameters and buffers, so a checkpoint is `state_dict()`.

    A method is built as `M(backbone, **recipe["method"])`: its keyword-only parameters are its recipe section.
    """

    views: tuple[int, int]  # the fewest and the most it works with

    def begin(self, images: int) -> None:
        """Called once before training, with the number of training images: memory with a row for each is made here."""

    def try_views(self, views: Sequence[Tensor]) -> None:
        """Called once on the meta device, with views of one image. Raises UserError where it cannot work with them."""

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Scalars by name, each a mean over this rank's rows; `loss` is minimised, the rest is logged beside it.

        What health.py judges, where it applies. `entropy` and `usage` of what is learnt from, as shares of ln K: the
        entropy of a row's distribution over K prototypes, and that of all rows' mean. `gain` of a contrastive loss:
        ln K less the cross-entropy in nats, 0 for a uniform guess among K candidates."""
        raise NotImplementedError

    def before_step(self, at: Progress) -> None:
        """Gradients are ready and clipped, and the optimiser has not moved yet."""

    def after_step(self, at: Progress) -> None:
        """The optimiser has moved the parameters; momentum encoders may follow here."""

    def export(self) -> Backbone:
        """The backbone that evaluations read and exports ship."""
        raise NotImplementedError

    def watched(self) -> Backbone:
        """The backbone whose features of the training images a monitor reads."""
        return self.export()


class Classifier(Method):
    """Labels from the shards, mixed with the images and smoothed, are what a linear layer on the backbone learns. C
    classes."""

    views = (1, 100)

    def __init__(
        self, backbone: Backbone, *, classes: int, smoothing: float, mixup: float, cutmix: float, ema: float | None
    ) -> None:
        super().__init__()
        head = nn.Linear(backbone.dim, classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        self.encoder = Encoder(backbone, head)
        self.decay = ema
        self.average = None if ema is None else ema_copy(self.encoder)
        self.mixing = Mixing(classes, smoothing=smoothing, mixup=mixup, cutmix=cutmix)

    def try_views(self, views: Sequence[Tensor]) -> None:
        sizes = sorted({x.shape[3] for x in views})
        if len(sizes) > 1:
            raise UserError(
                f"views: sizes of {sizes} pixels; images are mixed with each other, so one size is expected"
            )

    def after_step(self, at: Progress) -> None:
        if self.average is not None and self.decay is not None:
            average(self.average, self.encoder, self.decay)

    def classify(self, images: Tensor) -> Tensor:
        """Scores (B, C) of images (B, 3, H, W)."""
        return self.judge([images])  # type: ignore[no-any-return]

    @property
    def judge(self) -> Encoder[nn.Linear]:
        """What is to be evaluated: the average of the weights where there is one."""
        return self.encoder if self.average is None else self.average

    def export(self) -> Backbone:
        return self.judge.backbone

    def watched(self) -> Backbone:
        return self.encoder.backbone


def judged(z: Tensor, y: Tensor, *, sure: bool) -> dict[str, Tensor]:
    """Cross-entropy of scores z with distributions y, both (B, C); `usage`; and the share of right answers where images
    are of one class for `sure`."""
    z = z.float()
    mean = z.detach().softmax(1).mean(0)
    out = {"loss": F.cross_entropy(z, y), "usage": torch.special.entr(mean).sum() / math.log(len(mean))}
    return out | ({"accuracy": (z.argmax(1) == y.argmax(1)).float().mean()} if sure else {})
