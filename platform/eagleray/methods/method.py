"""The base class of every method, and the base class of those that learn from labels."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch, whole_boxes
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import average, ema_copy
from eagleray.views.mixing import Mixing


class Method(nn.Module):
    """A pretraining method turns the views of a batch into a loss. B images on this rank, V views, S pixels on a side.

    It is built as `M(backbone, **recipe["method"])`: the keyword-only parameters of its `__init__` are the keys of the
    recipe's `method` section. All its state is parameters and buffers, so a checkpoint is its `state_dict()`.

    Hooks are called in this order: `check_views` when a run is planned, `allocate` once before training, then in each
    step `forward`, `before_step` and `after_step`. `export` may be called at any time.
    """

    views: ClassVar[tuple[int, int]]
    """The smallest and the largest number of views that the method works with."""

    supervised: ClassVar[bool] = False
    """True if the method learns from the labels of the training set. Its own classifier then evaluates the run."""

    may_change: ClassVar[tuple[str, ...]] = ()
    """The keys of the `method` section that may have another value when a run is continued. All others identify it."""

    needs_boxes: ClassVar[bool] = False
    """True if the method reads `Batch.boxes`, which say where in the image each view lies."""

    pooled_only: ClassVar[bool] = False
    """True if the method reads nothing but the pooled vectors of what it trains, so that a ViT may see some of the
    patches of each view."""

    shardable: ClassVar[bool] = False
    """True if FSDP may divide the weights among ranks: the method reads them in `forward` alone, and nothing but the
    optimiser and `ema_update` changes them."""

    norm_group: int | None = None
    """The number of images that are normalised together, which must divide the images of every rank; None: all."""

    classes: int | None = None
    """The number of classes of the labels that the method learns from; None: it reads no labels."""

    def check_views(self, views: Sequence[Tensor]) -> None:
        """Check that the method can work with views of these sizes, V x (1 or 2, 3, S, S).

        Called once on the meta device, so the views hold no data. Raises UserError, which names the recipe key, when
        the sizes do not fit.
        """

    def allocate(self, images: int) -> None:
        """Create the buffers that have a row for each image of the training set.

        Called once, after the method was built and before its checkpoint is loaded and it is moved to its device.
        """

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Return scalars by name, each a mean over this rank's rows. `loss` is minimised, the others are logged.

        `batch.views` is V x (B, 3, S, S), `at` is the position of the step in the run. Buffers may be changed here.
        When the gradient of the step is not finite, the loop restores them, except those of a `Memory`.

        Three names are also used to judge the health of a run. `entropy` and `usage` describe the targets p (B, K) over
        K prototypes, as shares of ln K: the mean entropy of a row, and the entropy of the mean row. `gain` describes a
        contrastive loss: ln K minus the cross-entropy in nats, which is 0 for a uniform guess among K candidates.
        """
        raise NotImplementedError

    def loss(self, views: Sequence[Tensor], label: Tensor | None = None, at: Progress | None = None) -> Tensor:
        """Return the loss () of V views (B, 3, S, S), each of a whole image, as in the first step of a run. For a
        notebook: methods that keep a row for each image need `allocate` first, and here the images are the first B.

        `label` (B,) is the class of each image, and is read by methods that learn from labels alone."""
        count, device = len(views[0]), views[0].device
        label = torch.zeros(count, dtype=torch.long, device=device) if label is None else label
        batch = Batch(list(views), torch.arange(count, device=device), label, (count,), whole_boxes(views))
        return self(batch, at or Progress(step=0, steps_per_epoch=1, epochs=1))["loss"]  # type: ignore[no-any-return]

    def before_step(self, at: Progress) -> None:
        """Change or drop gradients before the optimiser step.

        The gradients are already averaged over ranks and clipped.
        """

    def after_step(self, at: Progress) -> None:
        """Update momentum encoders and buffers. Called after the optimiser step."""

    def export(self) -> Backbone:
        """Return the backbone that is evaluated and exported."""
        raise NotImplementedError

    def monitored_backbone(self) -> Backbone:
        """Return the backbone whose features of the training images the monitor reads, inside an `Encoder`.

        It differs from the backbone of `export` if that one never sees training images, such as an average of the
        weights.
        """
        return self.export()


class Classifier(Method):
    """Classifies images into C classes by a linear layer on the backbone, and learns from mixed and smoothed labels."""

    views = (1, 100)
    supervised = True

    def __init__(
        self, backbone: Backbone, *, classes: int, smoothing: float, mixup: float, cutmix: float, ema: float | None
    ) -> None:
        """`ema` is the decay of a moving average of the weights; None keeps no average.

        If there is an average, it classifies images and is exported.
        """
        super().__init__()
        self.classes = classes
        head = nn.Linear(backbone.dim, classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        self.encoder = Encoder(backbone, head)
        self.decay = ema
        self.average = None if ema is None else ema_copy(self.encoder)
        self.mixing = Mixing(classes, smoothing=smoothing, mixup=mixup, cutmix=cutmix)

    def check_views(self, views: Sequence[Tensor]) -> None:
        sizes = sorted({x.shape[3] for x in views})
        if len(sizes) > 1:
            raise UserError(
                f"views: sizes of {sizes} pixels; images are mixed with each other, so one size is expected"
            )

    def after_step(self, at: Progress) -> None:
        if self.average is not None and self.decay is not None:
            average(self.average, self.encoder, self.decay)

    def classify(self, images: Tensor) -> Tensor:
        """Return the class scores (B, C) of images (B, 3, S, S)."""
        return self.final_encoder([images])  # type: ignore[no-any-return]

    @property
    def final_encoder(self) -> Encoder[nn.Linear]:
        """The encoder to evaluate: the average of the weights where there is one."""
        return self.encoder if self.average is None else self.average

    def export(self) -> Backbone:
        return self.final_encoder.backbone

    def monitored_backbone(self) -> Backbone:
        return self.encoder.backbone


def classification_loss(scores: Tensor, labels: Tensor, *, one_class: bool) -> dict[str, Tensor]:
    """Return the cross-entropy of class scores with soft labels, both (B, C), and the `usage` of the predictions.

    The `accuracy` is added where every image has `one_class`, that is, where images are not mixed.
    """
    scores = scores.float()
    mean = scores.detach().softmax(1).mean(0)
    out = {"loss": F.cross_entropy(scores, labels), "usage": torch.special.entr(mean).sum() / math.log(len(mean))}
    return out | ({"accuracy": (scores.argmax(1) == labels.argmax(1)).float().mean()} if one_class else {})
