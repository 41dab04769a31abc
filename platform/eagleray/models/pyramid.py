"""What the backbones of stages have in common: the face of timm's, and a mean over the last grid."""

from collections.abc import Sequence
from typing import Any

from timm.layers import calculate_drop_path_rates
from torch import Tensor, nn


class Pyramid(nn.Module):
    """B images, C channels of the last stage, whose grid is h x w; `forward_features` gives (B, h, w, C)."""

    output_fmt = "NHWC"
    stage_fmt = "NCHW"  # of what goes from stage to stage
    num_features: int
    dims: Sequence[int]  # of each stage
    head: nn.Module  # of class scores, or nn.Identity

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers, first to last, as timm asks for them: what a stage begins with, then each of its blocks."""
        start = r"^stages\.(\d+)\.(?:[01]|embed|norm|position|tokens)(?:\.|$)"
        return {"blocks": [(start, (-1,)), (r"^stages\.(\d+)\.(?:blocks\.)?(\d+)", None), ("^norm", (99999,))]}

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """(B, h, w, C) to the mean patch (B, C), or to its class scores."""
        x = x.mean((1, 2))
        out: Tensor = x if pre_logits else self.head(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def drop_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Of the blocks of each stage, rising evenly from 0 to the rate over all of them."""
    return calculate_drop_path_rates(rate, list(depths), stagewise=True)  # type: ignore[return-value]


def classifier(dim: int, classes: int) -> nn.Module:
    return nn.Linear(dim, classes) if classes else nn.Identity()
