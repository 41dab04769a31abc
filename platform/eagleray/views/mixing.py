"""Mixup (Zhang et al. 2018, arXiv:1710.09412) and CutMix (Yun et al. 2019, arXiv:1905.04899), as timm has them."""

import torch
from timm.data.mixup import Mixup, mixup_target
from torch import Tensor

from eagleray.base.rng import seed_global_generators


class Mixing:
    """Every batch is mixed with itself in reverse, by one of the two where both are on; then labels are smoothed."""

    def __init__(self, classes: int, *, smoothing: float, mixup: float, cutmix: float) -> None:
        """`mixup` and `cutmix` are alpha of their Beta(alpha, alpha); 0 leaves one out, and both the images alone."""
        self.classes, self.smoothing, self.on = classes, smoothing, mixup > 0 or cutmix > 0
        self.mix = Mixup(mixup, cutmix, prob=1.0, switch_prob=0.5, label_smoothing=smoothing, num_classes=classes)

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 3, H, W), which change, and their labels (B,), to images and distributions over classes (B, C).
        What is drawn depends on PyTorch's seed on the CPU alone."""
        even = len(x) // 2 * 2 if self.on else 0
        done = []
        if even:
            with seed_global_generators(int(torch.randint(2**32, ()))):
                done.append(self.mix(x[:even], y[:even])[1])  # in place; timm takes pairs only
        if even < len(x):
            done.append(mixup_target(y[even:], self.classes, 1.0, self.smoothing))
        return x, torch.cat(done)
