"""Colour jitter, grayscale, blur, solarise, flip, normalise, erase: for a batch, on any device, each image its own way.

Each operation touches only the images that it applies to. Which those are is known on the CPU, where the parameters
were drawn, so the device is never waited for.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from eagleray.views.sampling import COLUMNS

TAPS = 13  # of the blur, 3 standard deviations of the widest
LUMA = (0.2989, 0.587, 0.114)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
FLIP, JITTER, FIRST, BRIGHTNESS, GRAY, SIGMA, SOLARIZE, TOP = (
    COLUMNS.index(c) for c in ("flip", "jitter", "first", "brightness", "gray", "sigma", "solarize", "erase_top")
)


def apply(images: Tensor, params: Tensor) -> Tensor:
    """uint8 images (B, 3, S, S) on the device and their parameters (B, 18), on the CPU, to normalised views."""
    x = images.float() / 255
    on_device = params.to(x.device, non_blocking=True)
    jitter = params[:, JITTER] > 0
    for turn in range(4):
        for op, function in enumerate((brightness, contrast, saturation, hue)):
            on = jitter & (params[:, FIRST + turn] == op)
            apply_where(x, on, lambda part, rows, f=function, op=op: f(part, on_device[rows, BRIGHTNESS + op]))  # type: ignore[misc]
    apply_where(x, params[:, GRAY] > 0, lambda part, _: gray(part).expand_as(part))
    apply_where(x, params[:, SIGMA] > 0, lambda part, rows: blur(part, on_device[rows, SIGMA]))
    apply_where(x, params[:, SOLARIZE] > 0, lambda part, _: solarize(part))
    apply_where(x, params[:, FLIP] > 0, lambda part, _: part.flip(-1))
    return erase_(normalise_(x), params[:, TOP:])


def apply_where(x: Tensor, on: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the images where `on`, a mask on the CPU, by the function of them and their rows."""
    rows = on.nonzero().squeeze(1)
    if len(rows):
        rows = rows.to(x.device, non_blocking=True)
        x[rows] = function(x[rows], rows)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    return (x * per_image(factor)).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(gray(x).mean((1, 2, 3), keepdim=True), x, per_image(factor)).clamp_(0, 1)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(gray(x), x, per_image(factor)).clamp_(0, 1)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by a share of the circle, through HSV."""
    r, g, b = x.unbind(1)
    value, top = x.max(1)
    chroma = value - x.min(1).values
    safe = torch.where(chroma > 0, chroma, 1.0)
    sector = torch.where(top == 0, (g - b) / safe, torch.where(top == 1, 2 + (b - r) / safe, 4 + (r - g) / safe))
    turned = sector + 6 * shift.view(-1, 1, 1)
    k = (turned.unsqueeze(1) + per_channel((5.0, 3.0, 1.0), x.device)) % 6
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(k, 4 - k).clamp_(0, 1)


def gray(x: Tensor) -> Tensor:
    """Luminance (B, 1, S, S)."""
    r, g, b = x.split(1, 1)
    return LUMA[0] * r + LUMA[1] * g + LUMA[2] * b


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur with reflected borders: two multiplications with a banded matrix per image, which uses the fast
    matrix units where a convolution with a kernel per image would not."""
    size = x.shape[-1]
    reach = min(TAPS // 2, size - 1)
    at = torch.arange(-reach, reach + 1, device=x.device)
    taps = torch.softmax(-0.5 * (at / sigma.unsqueeze(1)) ** 2, 1)  # (B, K)
    source = (torch.arange(size, device=x.device).unsqueeze(1) + at).abs()  # (S, K), reflected at the first pixel
    source = torch.where(source < size, source, 2 * (size - 1) - source)
    pixels = torch.arange(size, device=x.device)
    band = (source.T.unsqueeze(2) == pixels).to(x.dtype).flatten(1)  # (K, S * S)
    matrix = (taps @ band).view(-1, 1, size, size)  # (B, 1, S, S)
    return matrix @ x @ matrix.mT


def solarize(x: Tensor) -> Tensor:
    return torch.where(x >= 128 / 255, 1 - x, x)


def normalise_(x: Tensor) -> Tensor:
    """Images (B, 3, S, S) in [0, 1] to zero mean and unit deviation over ImageNet, in place."""
    return x.sub_(per_channel(MEAN, x.device)).div_(per_channel(STD, x.device))


def normalise(images: Tensor, device: torch.device) -> Tensor:
    """uint8 images (B, 3, S, S) as the device's backbone wants them."""
    return normalise_(images.to(device, non_blocking=True).float().div_(255))


def erase_(x: Tensor, boxes: Tensor) -> Tensor:
    """Normal noise in boxes (B, 5) on the CPU, `draw.erased`, of images (B, 3, S, S), in place. Each box has a seed of
    its own, so its noise is the same in any batch, on devices of one kind."""
    for row in boxes[:, 2].nonzero().squeeze(1).tolist():
        top, left, h, w, seed = (int(value) for value in boxes[row].tolist())
        noise = torch.Generator(x.device).manual_seed(seed)
        x[row, :, top : top + h, left : left + w].normal_(generator=noise)
    return x


@functools.cache
def per_channel(values: tuple[float, float, float], device: torch.device) -> Tensor:
    """(3, 1, 1), made once: a constant that is sent to the device in every step would make the host wait for it."""
    return torch.tensor(values, device=device).view(3, 1, 1)


def per_image(factor: Tensor) -> Tensor:
    return factor.view(-1, 1, 1, 1)
