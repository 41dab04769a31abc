"""Mixes images and labels with timm's Mixup (Zhang et al. 2018, arXiv:1710.09412) and CutMix (Yun et al. 2019,
arXiv:1905.04899)."""

import torch
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor

from eagleray.base.rng import seed_global_generators


class Mixing:
    """Mixes each batch with the same batch in reverse order, and smooths the labels.

    If both Mixup and CutMix are on, one of the two is drawn for each batch."""

    def __init__(self, classes: int, *, smoothing: float, mixup: float, cutmix: float) -> None:
        """`mixup` and `cutmix` are the alphas of Beta(alpha, alpha) distributions. 0 switches an operation off."""
        self.classes, self.smoothing, self.on = classes, smoothing, mixup > 0 or cutmix > 0
        self.mix = Mixup(mixup, cutmix, prob=1.0, switch_prob=0.5, label_smoothing=smoothing, num_classes=classes)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images (B, 3, H, W) in place. Return them and their target distributions over classes (B, C).

        The distributions follow from the labels y (B,). The random numbers depend on PyTorch's CPU generator alone."""
        even = len(x) // 2 * 2 if self.on else 0
        targets = []
        if even:
            with seed_global_generators(int(torch.randint(2**32, ()))):
                targets.append(self.mix(x[:even], y[:even])[1])  # changes x in place; timm requires an even batch size
        if even < len(x):
            targets.append(mixup_target(y[even:], self.classes, 1.0, self.smoothing))
        return x, torch.cat(targets)
