"""Stochastic depth for a network that was built without it: Huang et al. 2016, arXiv:1603.09382."""

from timm.layers import DropPath, calculate_drop_path_rates
from torch import nn

NAMES = ("drop_path", "drop_path1", "drop_path2")


def set_drop_path(model: nn.Module, rate: float) -> float:
    """Give the blocks rates that rise evenly from 0 to `rate`, in place. Returns the rate of the last: 0 for a model
    without such a part."""
    found: list[tuple[nn.Module, list[str]]] = []
    for block in model.modules():
        names = [name for name, part in block.named_children() if name in NAMES or isinstance(part, DropPath)]
        found += [(block, names)] if names else []
    rates = calculate_drop_path_rates(rate, len(found)) if found else []
    for (block, names), share in zip(found, rates, strict=True):
        for name in names:
            setattr(block, name, DropPath(share) if share else nn.Identity())  # type: ignore[arg-type]
    return rate if found else 0.0
