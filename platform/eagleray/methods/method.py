"""What every pretraining method is."""

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from eagleray.data.batch import Batch
from eagleray.models.backbone import Backbone
from eagleray.schedule import Progress

# Ranges of what a method's recipe section may hold.
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Method(nn.Module):
    """Views in, a loss out. All state is parameters and buffers, so a checkpoint is `state_dict()`.

    A method is built as `M(backbone, **recipe["method"])`: its keyword-only parameters are its recipe section.
    """

    views: tuple[int, int]  # the fewest and the most it works with

    def begin(self, images: int) -> None:
        """Called once before training, with the number of training images: memory with a row for each is made here."""

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
