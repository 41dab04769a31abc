"""Applies the operations of views to a batch on any device: photometric ones, flips, normalisation, erasing and others.

Each image has its own parameters, and each operation changes only some of the images. The parameters are drawn on the
CPU, so the host knows which images an operation changes without waiting for the device."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from eagleray.config.view import APPLIED
from eagleray.views.colours import colours
from eagleray.views.sampling import COLUMNS

TAPS = 13  # most taps of the blur's kernel: the centre and, for a sigma of 2 pixels, 3 sigma to each side
LUMA = (0.2989, 0.587, 0.114)
FLIP, FIRST, BRIGHTNESS, SIGMA, TOP = (COLUMNS.index(c) for c in ("flip", "first", "brightness", "sigma", "erase_top"))
RECROP, NOISE_STD, NOISE_SEED, QUARTERS, CUT, TURN = (
    COLUMNS.index(c) for c in ("recrop_top", "noise_std", "noise_seed", "quarters", "cut_top", "turn0")
)
# The column that is above 0 where an operation is applied, for the operations whose column has another name.
NAMES = {"recrop": "recrop_height", "blur": "sigma", "noise": "noise_std", "rotate": "quarters", "cutout": "cut_side"}
SWITCHES = {name: COLUMNS.index(NAMES.get(name, name)) for name in APPLIED}


def apply(images: Tensor, params: Tensor, *, compiled: bool = False) -> Tensor:
    """Turn uint8 crops (B, 3, S, S) on the device into normalised views. The parameters (B, P) stay on the CPU.

    With `compiled`, colour jitter is compiled: it accesses the batch a few times, not parts of it some eighty times."""
    x = images.float() / 255
    on_device = params.to(x.device, non_blocking=True)
    turns = params[:, TURN : TURN + len(APPLIED)]
    for order in turns.unique(dim=0):
        mine = (turns == order).all(1)
        for number in order.int().tolist():
            name = APPLIED[number]
            on = mine & (params[:, SWITCHES[name]] > 0)
            if name == "jitter" and compiled:
                turns_of = params[:, FIRST : FIRST + 4].where(on.unsqueeze(1), -1.0).to(x.device, non_blocking=True)
                x = compiled_jitter()(x, turns_of, on_device[:, BRIGHTNESS : BRIGHTNESS + 4])
            else:
                apply_one_(x, name, on, params, on_device)
    return erase_(normalise_(x), params[:, TOP:])


def apply_one_(x: Tensor, name: str, on: Tensor, params: Tensor, on_device: Tensor) -> None:
    """Apply the operation `name` in place to those images x (B, 3, S, S) that the mask `on` (B,) selects. `params`
    (B, P) are the parameters on the CPU, `on_device` their copy on the device."""
    if name == "jitter":
        for turn in range(4):
            for op, function in enumerate(jitters(x)):
                now = on & (params[:, FIRST + turn] == op)
                apply_where(x, now, lambda part, rows, f=function, op=op: f(part, on_device[rows, BRIGHTNESS + op]))  # type: ignore[misc]
    elif name == "rotate":
        for quarters in (1, 2, 3):
            now = on & (params[:, QUARTERS] == quarters)
            apply_where(x, now, lambda part, _, k=quarters: part.rot90(k, (2, 3)))  # type: ignore[misc]
    elif name == "noise":
        for row in on.nonzero().squeeze(1).tolist():
            x[row].add_(grain(x[row], params[row]), alpha=float(params[row, NOISE_STD])).clamp_(0, 1)
    else:
        apply_where(x, on, lambda part, rows: FUNCTIONS[name](part, on_device[rows]))


def grain(x: Tensor, row: Tensor) -> Tensor:
    """Draw normal noise for an image (3, S, S), with the seed in its parameters `row` (P,), which are on the CPU."""
    return torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(int(row[NOISE_SEED])))


def finish(images: Tensor, params: Tensor) -> Tensor:
    """Normalise uint8 crops (B, 3, S, S) and erase boxes, after all other operations. `params` (B, P) as in `apply`."""
    return erase_(normalise(images, images.device), params[:, TOP:])


def apply_where(x: Tensor, on: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the images x[rows] that `on` (B,), a mask on the CPU, selects by `function(x[rows], rows)`."""
    rows = on.nonzero().squeeze(1)
    if len(rows):
        rows = rows.to(x.device, non_blocking=True)
        x[rows] = function(x[rows], rows)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Scale each image (B, 3, S, S) by its factor (B,)."""
    return (x * per_image(factor)).clamp_(0, 1)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with the mean of its luminance. A factor (B,) of 0 gives the mean, 1 the image."""
    return torch.lerp(gray(x).mean((1, 2, 3), keepdim=True), x, per_image(factor)).clamp_(0, 1)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Blend each image with its luminance. A factor (B,) of 0 gives the luminance, 1 the image."""
    return torch.lerp(gray(x), x, per_image(factor)).clamp_(0, 1)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of each image in HSV by `shift` (B,), a fraction of the full circle."""
    r, g, b = x.unbind(1)
    value, top = x.max(1)
    chroma = value - x.min(1).values
    safe = torch.where(chroma > 0, chroma, 1.0)
    sector = torch.where(top == 0, (g - b) / safe, torch.where(top == 1, 2 + (b - r) / safe, 4 + (r - g) / safe))
    turned = sector + 6 * shift.view(-1, 1, 1)
    k = (turned.unsqueeze(1) + torch.arange(5, 0, -2, device=x.device).view(-1, 1, 1)) % 6
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(k, 4 - k).clamp_(0, 1)


def gray(x: Tensor) -> Tensor:
    """Return the luminance (B, 1, S, S) of RGB images (B, 3, S, S), or the mean of the channels of any other images."""
    if x.shape[1] != len(LUMA):
        return x.mean(1, keepdim=True)
    r, g, b = x.split(1, 1)
    return LUMA[0] * r + LUMA[1] * g + LUMA[2] * b


def blur(x: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image with a Gaussian of its `sigma` (B,) pixels. The borders are reflected.

    Each image is multiplied from both sides by a banded matrix of its own, on a GPU's fast matrix units. Convolutions
    would not use these units, as each image has its own kernel."""
    size = x.shape[-1]
    reach = min(TAPS // 2, size - 1)
    at = torch.arange(-reach, reach + 1, device=x.device)
    taps = torch.softmax(-0.5 * (at / sigma.unsqueeze(1)) ** 2, 1)  # (B, K) with K taps
    source = (torch.arange(size, device=x.device).unsqueeze(1) + at).abs()  # (S, K) indices of pixels, reflected at 0
    source = torch.where(source < size, source, 2 * (size - 1) - source)
    pixels = torch.arange(size, device=x.device)
    band = (source.T.unsqueeze(2) == pixels).to(x.dtype).flatten(1)  # (K, S * S)
    matrix = (taps @ band).view(-1, 1, size, size)  # (B, 1, S, S)
    return matrix @ x @ matrix.mT


def solarize(x: Tensor) -> Tensor:
    """Invert the values of at least 128 / 255 in images in [0, 1]."""
    return torch.where(x >= 128 / 255, 1 - x, x)


def sobel(x: Tensor) -> Tensor:
    """Return the magnitude of the luminance's gradient (B, 1, S, S), by Sobel's 3x3 filters with reflected borders.

    It is 1 at a vertical or horizontal edge from black to white, and never more."""
    size = x.shape[-1]
    at = torch.arange(-1, size + 1, device=x.device).abs()
    at = torch.where(at < size, at, 2 * (size - 1) - at).clamp_(min=0)
    y = gray(x)[..., at, :][..., at]  # (B, 1, S + 2, S + 2)
    across, down = y[..., 2:] - y[..., :-2], y[..., 2:, :] - y[..., :-2, :]
    across = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    down = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
    return torch.hypot(across, down).div_(4).clamp_(max=1)


def recrop(x: Tensor, boxes: Tensor) -> Tensor:
    """Crop the boxes (B, 4) (top, left, height, width in pixels), and resize them to the images' size, bilinearly.

    As in `blur`, each image is multiplied by one matrix for its rows and one for its columns."""
    pixels = torch.arange(x.shape[-1], device=x.device)

    def weights(first: Tensor, length: Tensor) -> Tensor:
        centre = ((pixels + 0.5) * length / len(pixels) - 0.5).clamp_(min=0)  # (B, S)
        centre = first + torch.minimum(centre, length - 1)
        return (1 - (centre.unsqueeze(2) - pixels).abs()).clamp_(min=0).unsqueeze(1)  # (B, 1, S, S)

    top, left, height, width = boxes.split(1, 1)
    return weights(top, height) @ x @ weights(left, width).mT


def cutout(x: Tensor, squares: Tensor) -> Tensor:
    """Fill the squares (B, 3), top, left and side in pixels, with the mean colour, which normalisation turns into 0."""
    top, left, side = (column.view(-1, 1) for column in squares.unbind(1))
    pixels = torch.arange(x.shape[-1], device=x.device)
    rows, columns = ((pixels >= first) & (pixels < first + side) for first in (top, left))  # (B, S)
    inside = rows[:, None, :, None] & columns[:, None, None]
    return torch.where(inside, per_channel(colours(x.shape[1])[0], x.device), x)


JITTERS = (brightness, contrast, saturation, hue)


def jitters(x: Tensor) -> tuple[Callable[[Tensor, Tensor], Tensor], ...]:
    """Return the operations of colour jitter for images (B, N, S, S). Saturation and hue are for RGB images only."""
    return JITTERS if x.shape[1] == len(LUMA) else JITTERS[:2]


def jitter(x: Tensor, order: Tensor, strengths: Tensor) -> Tensor:
    """Apply up to four operations to each image (B, 3, S, S), one after the other. `order` (B, 4) has their indices in
    JITTERS, or -1 for none. `strengths` (B, 4) has a column for each operation.

    In each of the four turns, every operation is computed for all images, and each image keeps the result of its own
    operation. Compiled, a turn takes two kernels, one of them for the mean that contrast needs."""
    for turn in range(4):
        op, changed = per_image(order[:, turn]), x
        for number, function in enumerate(jitters(x)):
            changed = torch.where(op == number, function(x, strengths[:, number]), changed)
        x = changed
    return x


@functools.cache
def compiled_jitter() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the compiled `jitter`. The compiler, imported only here, takes two seconds to import."""
    return torch.compile(jitter)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # each takes images and their parameters (B, P)
    "recrop": lambda x, p: recrop(x, p[:, RECROP : RECROP + 4]),
    "gray": lambda x, _: gray(x).expand_as(x),
    "blur": lambda x, p: blur(x, p[:, SIGMA]),
    "solarize": lambda x, _: solarize(x),
    "sobel": lambda x, _: sobel(x).expand_as(x),
    "cutout": lambda x, p: cutout(x, p[:, CUT : CUT + 3]),
    "flip": lambda x, _: x.flip(-1),
}


def normalise_(x: Tensor) -> Tensor:
    """Normalise images (..., N, S, S) in [0, 1] in place by the means and standard deviations of `colours`: ImageNet's
    for RGB, otherwise those to which decoding has scaled every channel."""
    mean, std = colours(x.shape[-3])
    return x.sub_(per_channel(mean, x.device)).div_(per_channel(std, x.device))


def normalise(images: Tensor, device: torch.device) -> Tensor:
    """Copy uint8 images (B, N, S, S) to the device and normalise them for the backbone."""
    if device.type != "cpu":
        return normalise_(images.to(device, non_blocking=True).float().div_(255))
    x = torch.empty(images.shape)
    for row, pixels in zip(x, images, strict=True):  # each image stays in the CPU's cache between operations
        normalise_(row.copy_(pixels).div_(255))
    return x


def erase_(x: Tensor, boxes: Tensor) -> Tensor:
    """Fill a box of each image x (B, 3, S, S) in place with normal noise.

    `boxes` (B, 5), on the CPU, are results of `sampling.erase_boxes`. Each has its own seed, so its noise does not
    depend on the rest of the batch, and is the same on all devices of one kind."""
    for row in boxes[:, 2].nonzero().squeeze(1).tolist():
        top, left, h, w, seed = (int(value) for value in boxes[row].tolist())
        noise = torch.Generator(x.device).manual_seed(seed)
        x[row, :, top : top + h, left : left + w].normal_(generator=noise)
    return x


@functools.cache
def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return N `values` as a tensor (N, 1, 1), cached, as copying it in every step would make the host wait."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


def per_image(factor: Tensor) -> Tensor:
    """Reshape one number per image (B,) to (B, 1, 1, 1)."""
    return factor.view(-1, 1, 1, 1)
