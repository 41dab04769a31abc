"""The stages of a pyramid or the blocks of a ViT, and their outputs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from eagleray.base.errors import UserError

# The last stage, every stage, or every block; a ViT's stages are its blocks.
Parts = Literal["last", "stages", "blocks"]


def stages(model: Any) -> list[nn.Module]:
    """Return the stages or blocks, first to last. Raises UserError for a model that has none."""
    for name in ("layers", "stages", "blocks"):  # Swin, our pyramids, ViTs
        if hasattr(model, name):
            return list(getattr(model, name))
    parts = [module for name, module in model.named_children() if name.startswith("layer")]  # ResNets
    if not parts:
        raise UserError(f"backbone.name: {type(model).__name__} has neither stages nor blocks to read tokens from")
    return parts


def convolutional(model: Any) -> bool:
    """Return whether a model is a convolutional network with stages, such as a ResNet or a ConvNeXt.

    Its interface tells: it embeds no patches, and its maps are (B, D, h, w)."""
    staged = any(hasattr(model, name) for name in ("layers", "stages", "layer1"))
    return staged and not hasattr(model, "patch_embed") and getattr(model, "output_fmt", "NCHW") != "NHWC"


def blocks(model: Any) -> list[nn.Module]:
    """Return the blocks of all stages, first to last. Raises UserError for a model without stages or blocks."""
    return [block for stage in stages(model) for block in blocks_of(stage)]


def blocks_of(stage: nn.Module) -> list[nn.Module]:
    """Return the blocks of a stage. A stage that is itself a block, as in a ViT, is returned alone."""
    inner = getattr(stage, "blocks", stage)
    members = list(inner) if isinstance(inner, nn.Sequential | nn.ModuleList) else [stage]
    return [m for m in members if next(m.children(), None) is not None]  # no single layers, such as an embedding


def modules(model: Any, parts: Parts) -> list[nn.Module]:
    """Return the last stage, all stages or all blocks of a model, first to last. Raises UserError if it has none."""
    return blocks(model) if parts == "blocks" else stages(model)[-1 if parts == "last" else 0 :]


def widths(model: Any, parts: Parts) -> list[int]:
    """Return the number of output channels of each of the `parts` of a model."""
    if parts == "last":
        return [model.num_features]
    each = stages(model)
    dims = (
        list(model.dims) if hasattr(model, "dims") else [info["num_chs"] for info in model.feature_info][-len(each) :]
    )
    if parts == "stages":
        return dims
    return [dim for stage, dim in zip(each, dims, strict=True) for _ in blocks_of(stage)]


@contextmanager
def stage_outputs(parts: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A context that collects the outputs of stages or blocks in a list while it is open."""
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for part in parts:
            hooks.enter_context(part.register_forward_hook(lambda _, __, out: outputs.append(out)))
        yield outputs
