"""Supervised training learns from mixed and smoothed labels as in DeiT (Touvron et al. 2021, arXiv:2012.12877).

B images, V views, C classes."""

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from eagleray.config.schedule import Progress
from eagleray.config.types import Classes, Share
from eagleray.data.batch import Batch
from eagleray.methods.method import Classifier, classification_loss
from eagleray.models.backbone import Backbone


class Supervised(Classifier):
    """The loss is the cross-entropy of every view; several views of an image are DeiT's repeated augmentation."""

    pooled_only = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: Classes,
        smoothing: Share = 0.1,
        mixup: NonNegativeFloat = 0.8,
        cutmix: NonNegativeFloat = 1.0,
        ema: Share | None = None,  # decay of the averaged weights, which are exported and classify; None: no average
    ) -> None:
        super().__init__(backbone, classes=classes, smoothing=smoothing, mixup=mixup, cutmix=cutmix, ema=ema)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x, y = self.mixing(torch.cat(batch.views), batch.label.repeat(len(batch.views)))
        z = self.encoder([x])  # (V * B, C)
        return classification_loss(z, y, one_class=not self.mixing.on)
