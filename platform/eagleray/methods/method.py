"""What every pretraining method is."""

from torch import Tensor, nn

from eagleray.data.batch import Batch
from eagleray.models.backbone import Backbone
from eagleray.schedule import Progress


class Method(nn.Module):
    """Views in, a loss out. All state is parameters and buffers, so a checkpoint is `state_dict()`.

    A method is built as `M(backbone, **recipe["method"])`: its keyword-only parameters are its recipe section.
    """

    views: tuple[int, int]  # the fewest and the most it works with

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Scalars by name, each a mean over this rank's rows; `loss` is minimised, the rest is logged beside it."""
        raise NotImplementedError

    def before_step(self, at: Progress) -> None:
        """Gradients are ready and clipped, and the optimiser has not moved yet."""

    def after_step(self, at: Progress) -> None:
        """The optimiser has moved the parameters; momentum encoders may follow here."""

    def export(self) -> Backbone:
        """The backbone that evaluations read and exports ship."""
        raise NotImplementedError
