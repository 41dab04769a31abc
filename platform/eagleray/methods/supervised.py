"""Supervised training with soft labels: mixed, smoothed and augmented as in DeiT (Touvron et al. 2021,
arXiv:2012.12877)."""

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from eagleray.config.schedule import Progress
from eagleray.config.types import Classes, Share
from eagleray.data.batch import Batch
from eagleray.methods.method import Classifier, classification_loss
from eagleray.models.backbone import Backbone


class Supervised(Classifier):
    """Cross-entropy of every view of an image: with several of them, DeiT's repeated augmentation."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: Classes,
        smoothing: Share = 0.1,
        mixup: NonNegativeFloat = 0.8,
        cutmix: NonNegativeFloat = 1.0,
        ema: Share | None = None,  # decay of an average of the weights, which is exported and classifies
    ) -> None:
        super().__init__(backbone, classes=classes, smoothing=smoothing, mixup=mixup, cutmix=cutmix, ema=ema)

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        x, y = self.mixing(torch.cat(batch.views), batch.label.repeat(len(batch.views)))
        z = self.encoder([x])  # (V * B, C)
        return classification_loss(z, y, one_class=not self.mixing.on)
