"""The stages of a pyramid or the blocks of a ViT, and their outputs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from eagleray.base.errors import UserError


def stages(model: Any) -> list[nn.Module]:
    """Return the stages or blocks, first to last. Raises UserError for a model that has none."""
    for name in ("layers", "stages", "blocks"):  # of Swin, of our pyramids, of a ViT
        if hasattr(model, name):
            return list(getattr(model, name))
    parts = [module for name, module in model.named_children() if name.startswith("layer")]  # of a ResNet
    if not parts:
        raise UserError(f"backbone.name: {type(model).__name__} has neither stages nor blocks to read tokens from")
    return parts


def blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of all stages, first to last. Raises UserError for a model that has neither."""
    out: list[nn.Module] = []
    for part in stages(model):
        inner = getattr(part, "blocks", part)
        members = list(inner) if isinstance(inner, nn.Sequential | nn.ModuleList) else [part]
        out += [m for m in members if next(m.children(), None) is not None]  # not the layers between stages
    return out


def widths(model: Any) -> list[int]:
    """Return the channels of each stage's or block's output."""
    if hasattr(model, "dims"):
        return list(model.dims)
    return [info["num_chs"] for info in model.feature_info][-len(stages(model)) :]


@contextmanager
def stage_outputs(parts: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the outputs of these stages or blocks in a list while the context is open."""
    outputs: list[Tensor] = []
    hooks = [part.register_forward_hook(lambda _, __, out: outputs.append(out)) for part in parts]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
