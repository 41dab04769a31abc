"""Features that are drawn, not extracted."""

import torch

from eagleray.protocols.features import LabelledFeatures


def clusters(n: int, *, spread: float, seed: int) -> LabelledFeatures:
    """Five gaussian classes in 16 dimensions."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 16, generator=torch.Generator().manual_seed(9))
    y = torch.arange(n) % 5
    return LabelledFeatures(centres[y] + spread * torch.randn(n, 16, generator=g), y)
