"""The parts of a network that its tokens go through one after the other: stages of a pyramid, blocks of a ViT."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from eagleray.base.errors import UserError


def stages(model: Any) -> list[nn.Module]:
    """The parts, first to last. Raises UserError for a model that has none."""
    for name in ("layers", "stages", "blocks"):  # Swin's, those of our pyramids, a ViT's
        if hasattr(model, name):
            return list(getattr(model, name))
    found = [module for name, module in model.named_children() if name.startswith("layer")]  # a ResNet's
    if not found:
        raise UserError(
            f"backbone.name: {type(model).__name__} has neither stages nor blocks whose tokens could be read"
        )
    return found


def widths(model: Any) -> list[int]:
    """Channels of what each part hands on."""
    if hasattr(model, "dims"):
        return list(model.dims)
    return [info["num_chs"] for info in model.feature_info][-len(stages(model)) :]


@contextmanager
def stage_outputs(parts: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A list that the outputs of the parts are added to."""
    seen: list[Tensor] = []
    hooks = [part.register_forward_hook(lambda _, __, out: seen.append(out)) for part in parts]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
