"""The base class of all methods, and the base class of methods that learn from labels."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.config.view import View
from eagleray.data.batch import Batch, whole_boxes
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.ema import average, ema_copy
from eagleray.views.mixing import Mixing


class Method(nn.Module):
    """Base class of pretraining methods: a method computes a loss from the views of a batch.

    In shapes, B is the number of images on this rank, V the number of views, and S the side of a view in pixels.
    Eagleray builds a method M as `M(backbone, **recipe["method"])`: the keyword-only parameters of its `__init__` are
    the keys of the recipe's `method` section. A checkpoint stores a method's `state_dict()`, so all state must be in
    parameters and buffers.

    Eagleray calls the hooks in this order: `check_views` and `check_crops` when it plans a run, `allocate` once before
    training, then `forward`, `before_step` and `after_step` in each step. Eagleray may call `export` at any time."""

    views: ClassVar[tuple[int, int]]
    """The smallest and the largest number of views that the method works with."""

    supervised: ClassVar[bool] = False
    """True if the method learns from the labels of the training set. Its own classifier then evaluates the run."""

    may_change: ClassVar[tuple[str, ...]] = ()
    """The keys of the `method` section that may have another value when a run is continued. All others identify it."""

    needs_boxes: ClassVar[bool | None] = False
    """True if the method reads `Batch.boxes`, which say where in the image each view lies; None if it does without them
    where views move pixels after the crop."""

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
        """Check that the method can work with views of these sizes: V tensors (1 or 2, 3, S, S).

        Eagleray calls `check_views` once, with views on the meta device, which hold no data. If the sizes do not fit,
        `check_views` raises a UserError that names the recipe key."""

    def check_crops(self, views: Sequence[View]) -> None:
        """Check the settings of V views, each of which counts once.

        Eagleray calls `check_crops` once. If the settings do not fit, `check_crops` raises a UserError that names the
        recipe key."""

    def allocate(self, images: int) -> None:
        """Create the buffers that have a row for each image of the training set.

        Eagleray calls `allocate` once, before it loads a checkpoint and before it moves the method to its device."""

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Return a dictionary of named scalars, which are means over this rank's images. The optimiser minimises
        `loss`; the log shows all.

        `batch.views` has V tensors (B, 3, S, S), and `at` is the position of the step in the run. `forward` may change
        buffers. If the gradient of the step is not finite, the training loop restores all buffers except those of a
        `Memory`.

        If a method returns the scalars `entropy`, `usage` or `gain`, Eagleray uses them to monitor the run's health.
        For targets p (B, K) over K prototypes, `entropy` is the mean entropy of a row and `usage` is the entropy of the
        mean row, both divided by ln K. For a contrastive loss, `gain` is ln K minus the cross-entropy in nats, which is
        0 for a uniform guess among K candidates."""
        raise NotImplementedError

    def loss(self, views: Sequence[Tensor], label: Tensor | None = None, at: Progress | None = None) -> Tensor:
        """Return the scalar loss of V views (B, 3, S, S), as in the first step of a run. `loss` is meant for notebooks:
        each view counts as a whole image, and the B images count as the first B of the training set. Call `allocate`
        first if the method keeps a row for each image. `label` (B,) is the class of each image, for methods that learn
        from labels."""
        count, device = len(views[0]), views[0].device
        label = torch.zeros(count, dtype=torch.long, device=device) if label is None else label
        batch = Batch(list(views), torch.arange(count, device=device), label, (count,), whole_boxes(views))
        return self(batch, at or Progress(step=0, steps_per_epoch=1, epochs=1))["loss"]  # type: ignore[no-any-return]

    def before_step(self, at: Progress) -> None:
        """Change or drop gradients before the optimiser step.

        At this point the gradients are already averaged over ranks and clipped."""

    def after_step(self, at: Progress) -> None:
        """Update momentum encoders and buffers. Called after the optimiser step."""

    def export(self) -> Backbone:
        """Return the backbone that Eagleray evaluates and exports."""
        raise NotImplementedError

    def monitored_backbone(self) -> Backbone:
        """Return the backbone whose features of training images the monitor reads. It must be part of an `Encoder`.

        Override this method if the exported backbone never sees training images, like an average of the weights."""
        return self.export()


class Classifier(Method):
    """Classifies images into C classes by a linear layer on the backbone, and learns from mixed and smoothed labels."""

    views = (1, 100)
    supervised = True

    def __init__(
        self, backbone: Backbone, *, classes: int, smoothing: float, mixup: float, cutmix: float, ema: float | None
    ) -> None:
        """`ema` is the decay of a moving average of the weights; None keeps no average.

        If there is an average, it classifies images and is exported."""
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
        """The encoder to evaluate, which has the averaged weights if the method averages them."""
        return self.encoder if self.average is None else self.average

    def export(self) -> Backbone:
        return self.final_encoder.backbone

    def monitored_backbone(self) -> Backbone:
        return self.encoder.backbone


def classification_loss(scores: Tensor, labels: Tensor, *, one_class: bool) -> dict[str, Tensor]:
    """Return the cross-entropy of class scores with soft labels, both (B, C), and the `usage` of the predictions.

    With `one_class`, which means that images are not mixed, the `accuracy` is returned too."""
    scores = scores.float()
    mean = scores.detach().softmax(1).mean(0)
    out = {"loss": F.cross_entropy(scores, labels), "usage": torch.special.entr(mean).sum() / math.log(len(mean))}
    return out | ({"accuracy": (scores.argmax(1) == labels.argmax(1)).float().mean()} if one_class else {})
