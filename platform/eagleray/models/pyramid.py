"""Base class of backbones with stages, which have timm's interface and return the mean of the last tokens."""

from collections.abc import Sequence
from typing import Any

from timm.layers import calculate_drop_path_rates, trunc_normal_
from torch import Tensor, nn


class Pyramid(nn.Module):
    """A backbone of stages. B images, C channels of the last stage, whose grid is h x w."""

    output_fmt = "NHWC"
    stage_fmt = "NCHW"  # layout of the tokens between stages
    num_features: int
    dims: Sequence[int]  # channels of each stage
    head: nn.Module  # the classifier, or nn.Identity

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns that group parameters into layers: the start of a stage, then each of its blocks."""
        start = r"^stages\.(\d+)\.(?:[01]|embed|norm|position|tokens)(?:\.|$)"
        return {"blocks": [(start, (-1,)), (r"^stages\.(\d+)\.(?:blocks\.)?(\d+)", None), ("^norm", (99999,))]}

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last tokens (B, h, w, C) of images (B, 3, H, W)."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the class scores of the mean (B, C) of tokens (B, h, w, C), or with `pre_logits` the mean itself."""
        x = x.mean((1, 2))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def drop_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Return the drop path rates of each stage's blocks, which rise evenly from 0 to `rate`."""
    return calculate_drop_path_rates(rate, list(depths), stagewise=True)  # type: ignore[return-value]


def classifier(dim: int, classes: int) -> nn.Module:
    """Return a linear classifier, or the identity for no classes."""
    return nn.Linear(dim, classes) if classes else nn.Identity()


def init(module: nn.Module) -> None:
    """Initialise a linear layer: truncated normal weights with std 0.02, zero biases."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
