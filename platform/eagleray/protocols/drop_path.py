"""Add stochastic depth to a network that was built without it: Huang et al. 2016, arXiv:1603.09382."""

from timm.layers import DropPath, calculate_drop_path_rates
from torch import nn

NAMES = ("drop_path", "drop_path1", "drop_path2")


def set_drop_path(model: nn.Module, rate: float) -> float:
    """Set the drop path rates of a model in place: they rise linearly from 0 at the first block to `rate` at the last.

    Returns the rate of the last block, or 0 for a model without drop path modules."""
    blocks: list[tuple[nn.Module, list[str]]] = []
    for block in model.modules():
        names = [name for name, part in block.named_children() if name in NAMES or isinstance(part, DropPath)]
        blocks += [(block, names)] if names else []
    rates = calculate_drop_path_rates(rate, len(blocks)) if blocks else []
    for (block, names), share in zip(blocks, rates, strict=True):
        for name in names:
            setattr(block, name, DropPath(share) if share else nn.Identity())  # type: ignore[arg-type]
    return rate if blocks else 0.0
