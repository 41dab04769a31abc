"""Groups the parameters of a method into layers by their names: patch projection, blocks, rest of backbone, heads."""

import re
from collections.abc import Sequence

# TRUNK: the backbone's parameters in no block and not in the input layer. HEADS: all parameters outside the backbone.
TRUNK, HEADS = "trunk", "heads"
INPUT = ("patch_embed", "stem", "conv1")  # module names of the layer that sees the pixels
_BACKBONE = "backbone.model."
_LAYER = re.compile(
    rf"backbone\.model\.((?:blocks|stages|layers)[\d.]*(?:blocks)?[.\d]*\d|layer\d|{'|'.join(INPUT)})\b"
)


def in_backbone(parameter: str) -> bool:
    """Return whether a parameter of a method belongs to a backbone, by its name."""
    return _BACKBONE in parameter


def in_adapter(parameter: str) -> bool:
    """Return whether a parameter belongs to an adapter of `backbone.lora`, by its name."""
    return ".lora." in parameter


def layers_of(parameters: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the names of the layers in the order of a forward pass, and the index of each parameter's layer."""
    names = []
    for parameter in parameters:
        match = _LAYER.search(parameter)
        rest = TRUNK if in_backbone(parameter) else HEADS
        names.append(re.sub(r"\b(\d)\b", r"0\1", match[1]) if match else rest)
    order = sorted(set(names), key=lambda n: (n in (TRUNK, HEADS), n not in INPUT, n))
    return order, [order.index(n) for n in names]
