"""Adapts weights that were trained with another pixel mean and std: the first layer is changed to take our pixels."""

from typing import NamedTuple

import torch
from timm.models import Eva, VisionTransformer
from torch import Tensor, nn

from eagleray.views.colours import MEAN, STD


class Pixels(NamedTuple):
    """The mean and the standard deviation of each colour channel, for pixels from 0 to 1, that a backbone expects."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        return " and ".join(f"{name} {', '.join(f'{x:g}' for x in self[i])}" for i, name in enumerate(("mean", "std")))


OURS = Pixels(MEAN, STD)


def conversion(theirs: Pixels) -> Tensor:
    """Return the factors and summands (2, 3) that turn pixels normalised by our mean and std into those of `theirs`."""
    m0, s0, m1, s1 = (torch.tensor(x, dtype=torch.float64) for x in (*OURS, *theirs))
    return torch.stack([s0 / s1, (m0 - m1) / s1])


def first_convolution(model: nn.Module) -> tuple[str, nn.Conv2d] | None:
    """Return the name and the module of the first convolution with 3 input channels; None if there is none."""
    each = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.in_channels == len(MEAN))
    return next(each, None)


def convert(model: nn.Module, tensors: dict[str, Tensor], theirs: Pixels) -> bool:
    """Change a model's `tensors`, trained with pixels of `theirs`, so that its features are the same with our pixels.

    Return whether this is possible exactly; if not, the tensors stay as they are. The conversion is a factor and a
    summand for each channel, which a convolution takes into its weight and bias, but not if it pads with zeros, as the
    padding is not converted. Without a bias, the summands go into the positions that a ViT adds to its patches."""
    if theirs == OURS:
        return True
    name, conv = first_convolution(model) or ("", None)
    weight, bias = f"{name}.weight", f"{name}.bias"
    # Subclasses are left out, as they pad or standardise weights in their own way.
    if type(conv) is not nn.Conv2d or conv.padding != (0, 0) or conv.groups > 1 or weight not in tensors:
        return False
    factor, summand = conversion(theirs).view(2, 1, 3, 1, 1)
    kind, kernel = tensors[weight].dtype, tensors[weight].double()  # (D, 3, h, w)
    shift = (kernel * summand).sum((1, 2, 3))  # (D,)
    if conv.bias is not None:  # a bias that `tensors` lack is zero
        tensors[bias] = (tensors[bias].double() + shift if bias in tensors else shift).to(kind)
    elif isinstance(model, VisionTransformer | Eva) and "pos_embed" in tensors:
        table = tensors["pos_embed"].double()  # (1, P + N, D), the N patches last
        prefix = table.shape[1] - model.patch_embed.num_patches
        tensors["pos_embed"] = torch.cat([table[:, :prefix], table[:, prefix:] + shift], 1).to(kind)
    else:
        return False
    tensors[weight] = (kernel * factor).to(kind)
    return True
