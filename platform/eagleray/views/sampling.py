"""Draws the random parameters of views, distributed as in torchvision, from the seed, the epoch and the sample alone.

Counter-based generators of each sample draw a row of uniform random numbers for each view. So the views of a sample do
not depend on the process that reads it, nor on what was read before."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagleray.config.view import APPLIED, View

TRIES = 10  # pairs of an area and an aspect ratio that are drawn; if none fits the image, its centre is cropped
ORDERS = np.array(list(itertools.permutations(range(4))), np.float32)
# Columns of the uniform random numbers (V, WIDTH) of the views. The first 2 * TRIES columns, which have no names, are
# for the areas and then for the aspect ratios.
PLACE_Y, PLACE_X, FLIP, JITTER, ORDER, BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAY, BLUR, SIGMA, SOLARIZE = range(
    2 * TRIES, 2 * TRIES + 13
)
WIDTH = 2 * TRIES + 13
# Columns of the uniform random numbers for erasing and RandAugment, also after areas and aspect ratios. They come from
# a second generator, so that the numbers above stay the same with and without these operations.
ERASE, ERASE_Y, ERASE_X, NOISE, POLICY = range(2 * TRIES, 2 * TRIES + 5)
EXTRA_WIDTH = 2 * TRIES + 5
# Columns for the operations in NEW, from a third generator, after areas, aspect ratios, PLACE_Y and PLACE_X.
RECROP, SOBEL, ADD, STD, GRAIN, ROTATE, TURN, CUT, CUT_AREA, CUT_Y, CUT_X = range(2 * TRIES + 2, 2 * TRIES + 13)
NEW_WIDTH = 2 * TRIES + 13
NEW = ("recrop", "sobel", "noise", "rotate", "cutout")
# timm's ranges for a box to erase: its share of the area, and the logarithm of its aspect ratio.
ERASED, LOG_ASPECT = (0.02, 1 / 3), (np.log(0.3), np.log(1 / 0.3))

# The P columns of the photometric parameters (V, P) that `photometric.apply` reads.
COLUMNS: tuple[str, ...] = (
    "flip",
    "jitter",
    "first",
    "second",
    "third",
    "fourth",
    "brightness",
    "contrast",
    "saturation",
    "hue",
)
COLUMNS += ("gray", "sigma", "solarize")
COLUMNS += (
    "recrop_top",
    "recrop_left",
    "recrop_height",
    "recrop_width",
    "sobel",
    "noise_std",
    "noise_seed",
    "quarters",
)
COLUMNS += ("cut_top", "cut_left", "cut_side")
COLUMNS += tuple(f"turn{i}" for i in range(len(APPLIED)))  # index in APPLIED of the i-th operation
COLUMNS += ("erase_top", "erase_left", "erase_height", "erase_width", "noise")


@dataclass(frozen=True)
class Views:
    """The settings of all V views of a recipe as arrays. Settings with a count of n are n views."""

    views: tuple[View, ...]  # V views; their counts no longer matter
    scale: NDArray[np.float64]  # (V, 2) range of a crop's share of the image's area
    log_ratio: NDArray[np.float64]  # (V, 2) range of the logarithm of a crop's width over its height
    strength: NDArray[np.float64]  # (V, 4) strengths of the jitter of brightness, contrast, saturation and hue
    sigma: NDArray[np.float64]  # (V, 2) range of the blur's sigma in pixels
    probabilities: NDArray[np.float64]  # (V, 5) probabilities of flip, jitter, gray, blur and solarize
    size: NDArray[np.int64]  # (V,) side of the square view in pixels
    erasing: NDArray[np.float64]  # (V,) probability of erasing
    added: NDArray[np.float64]  # (V, 5) probabilities of the operations in NEW
    noise_std: NDArray[np.float64]  # (V, 2) range of the noise's standard deviation
    cutout_area: NDArray[np.float64]  # (V, 2) range of the cut-out share of the area
    turns: NDArray[np.int64]  # (V, A) indices of all A operations of APPLIED, in the view's order
    crop_row: NDArray[np.int64]  # (V,) index of the view whose crop each view shows
    needs_extra: bool  # whether some view needs `extra_uniforms`
    operations: int  # O, the largest number of plug-in operations of a view

    @classmethod
    def of(cls, views: Sequence[View]) -> "Views":
        v = tuple(itertools.chain.from_iterable([x] * x.count for x in views))
        return cls(
            v,
            np.array([x.scale for x in v]),
            np.log([x.ratio for x in v]),
            np.array([x.strength for x in v]),
            np.array([x.sigma for x in v]),
            np.array([[chance(x, name) for name in ("flip", "jitter", "gray", "blur", "solarize")] for x in v]),
            np.array([x.size for x in v]),
            np.array([x.erasing for x in v]),
            np.array([[chance(x, name) for name in NEW] for x in v]),
            np.array([x.noise_std for x in v]),
            np.array([x.cutout_area for x in v]),
            np.array([order_of(x) for x in v]),
            np.maximum.accumulate(np.array([0 if x.same_crop else row for row, x in enumerate(v)], np.int64)),
            any(x.erasing or x.randaugment or any(getattr(x, name) for name in NEW) for x in v),
            max((len(x.operations) for x in v), default=0),
        )


def chance(view: View, name: str) -> float:
    """Return the probability of an operation of APPLIED. It is 0 where the view's `apply` leaves the operation out."""
    return float(getattr(view, name)) if view.apply is None or name in view.apply else 0.0


def order_of(view: View) -> list[int]:
    """Return the indices of all operations of APPLIED: first those in the view's `apply`, in its order."""
    first = [APPLIED.index(name) for name in view.apply or ()]
    return first + [number for number in range(len(APPLIED)) if number not in first]


def generator(stream: int, *, seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return random generator number `stream` of a sample. The generators of different streams are independent."""
    key = np.array([seed, (epoch << 40) | sample], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, stream]))


def uniforms(views: int, *, seed: int, epoch: int, sample: int) -> NDArray[np.float64]:
    """Draw the uniform random numbers (V, WIDTH) in [0, 1) that decide the crops and colours of a sample's V views."""
    return generator(0, seed=seed, epoch=epoch, sample=sample).random((views, WIDTH))


def extra_uniforms(v: Views, *, seed: int, epoch: int, sample: int) -> NDArray[np.float64]:
    """Draw the uniform random numbers (V, EXTRA_WIDTH) for erasing and RandAugment. If any view has an operation of
    NEW, NEW_WIDTH more columns follow. If no view needs any of these numbers, the shape is (V, 0)."""
    if not v.needs_extra:
        return np.empty((len(v.views), 0))
    u = generator(1, seed=seed, epoch=epoch, sample=sample).random((len(v.views), EXTRA_WIDTH))
    if not v.added.any():
        return u
    new = generator(3, seed=seed, epoch=epoch, sample=sample).random((len(v.views), NEW_WIDTH))
    return np.concatenate([u, new], 1)


def operation_seeds(v: Views, *, seed: int, epoch: int, sample: int) -> NDArray[np.int64]:
    """Draw a seed below 2**63 for each plug-in operation of each view, (V, O). O is `Views.operations`."""
    drawn = generator(2, seed=seed, epoch=epoch, sample=sample)
    return drawn.integers(2**63, size=(len(v.views), v.operations), dtype=np.int64)


def crops(v: Views, u: NDArray[np.float64], height: int, width: int) -> NDArray[np.int64]:
    """Return top, left, height and width (V, 4), in pixels, of the random resized crops of an image."""
    return random_boxes(v.scale, v.log_ratio, u[v.crop_row], height, width)


def random_boxes(
    scale: NDArray[np.float64], log_ratio: NDArray[np.float64], u: NDArray[np.float64], height: int, width: int
) -> NDArray[np.int64]:
    """Return n boxes (n, 4) as `crops` does, from uniform random numbers `u` (n, ...). The ranges `scale` and
    `log_ratio` are (n, 2) or, shared by all boxes, (1, 2)."""
    area = height * width * stretch(scale, u[:, :TRIES])
    ratio = np.exp(stretch(log_ratio, u[:, TRIES : 2 * TRIES]))
    w = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    h = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)  # (n, TRIES)
    first = fits.argmax(1)
    rows = np.arange(len(u))
    h, w = h[rows, first], w[rows, first]
    top, left = (u[:, PLACE_Y] * (height - h + 1)).astype(np.int64), (u[:, PLACE_X] * (width - w + 1)).astype(np.int64)
    out = np.stack([top, left, h, w], 1)
    for row in np.flatnonzero(~fits.any(1)):
        out[row] = centre(height, width, np.exp(log_ratio[row % len(log_ratio)]))
    return out


def shares(boxes: NDArray[np.int64], height: int, width: int) -> NDArray[np.float32]:
    """Convert boxes (V, 4) of `crops` to left, top, right and bottom, as fractions of the image's width and height."""
    first, size = boxes[:, [1, 0]], boxes[:, [3, 2]]
    return (np.concatenate([first, first + size], 1) / (width, height, width, height)).astype(np.float32)


def centre(height: int, width: int, ratio: NDArray[np.float64]) -> tuple[int, int, int, int]:
    """Return top, left, height and width of the largest centred crop whose aspect ratio lies in the range `ratio`."""
    low, high = ratio
    h, w = height, width
    if width / height < low:
        h = max(round(width / low), 1)
    elif width / height > high:
        w = max(round(height * high), 1)
    return (height - h) // 2, (width - w) // 2, h, w


def photometrics(v: Views, u: NDArray[np.float64], extra: NDArray[np.float64] | None = None) -> NDArray[np.float32]:
    """Return the parameters (..., V, P) of the photometric operations, with the columns of COLUMNS.

    `u` (..., V, WIDTH) are results of `uniforms`, `extra` of `extra_uniforms`. Without `extra`, nothing is erased and
    no operation of NEW applied. A sigma of 0 means no blur, and an erase height of 0 no erasing."""
    flip, jitter, gray, blur, solarize = np.moveaxis(
        u[..., [FLIP, JITTER, GRAY, BLUR, SOLARIZE]] < v.probabilities, -1, 0
    )
    low, high = np.maximum(1 - v.strength[:, :3], 0), 1 + v.strength[:, :3]
    factors = low + (high - low) * u[..., BRIGHTNESS : SATURATION + 1]
    shift = v.strength[:, 3] * (2 * u[..., HUE] - 1)
    order = ORDERS[(u[..., ORDER] * len(ORDERS)).astype(np.int64)]
    sigma = np.where(blur, v.sigma[:, 0] + (v.sigma[:, 1] - v.sigma[:, 0]) * u[..., SIGMA], 0)
    columns = (
        flip[..., None],
        jitter[..., None],
        order,
        factors,
        *(x[..., None] for x in (shift, gray, sigma, solarize)),
        np.zeros((*u.shape[:-1], 11)) if extra is None or not v.added.any() else additions(v, extra[..., EXTRA_WIDTH:]),
        np.broadcast_to(v.turns, (*u.shape[:-1], len(APPLIED))),
        np.zeros((*u.shape[:-1], 5)) if extra is None or not v.erasing.any() else erase_boxes(v, extra),
    )
    return np.concatenate(columns, -1).astype(np.float32)


def additions(v: Views, u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the parameters (..., V, 11) of the operations of NEW, with the columns from recrop_top to cut_side.

    `u` (..., V, NEW_WIDTH) are uniform random numbers. For an operation that is not applied, its height, its standard
    deviation (of noise on pixels from 0 to 1), its number of quarter turns or its side is 0."""
    on = u[..., [RECROP, SOBEL, ADD, ROTATE, CUT]] < v.added
    recrop, sobel, noise, rotate, cut = np.moveaxis(on, -1, 0)
    boxes = np.zeros((*u.shape[:-1], 4))
    for row in np.flatnonzero(v.added[:, 0]):
        flat = u[..., row, :].reshape(-1, u.shape[-1])
        placed = random_boxes(v.scale[[row]], v.log_ratio[[row]], flat, int(v.size[row]), int(v.size[row]))
        boxes[..., row, :] = placed.reshape(boxes[..., row, :].shape)
    std = v.noise_std[:, 0] + (v.noise_std[:, 1] - v.noise_std[:, 0]) * u[..., STD]
    area = v.cutout_area[:, 0] + (v.cutout_area[:, 1] - v.cutout_area[:, 0]) * u[..., CUT_AREA]
    side = np.maximum(np.rint(np.sqrt(area) * v.size), 1)
    top, left = (np.floor(u[..., i] * (v.size - side + 1)) for i in (CUT_Y, CUT_X))
    seed, quarters = np.floor(u[..., GRAIN] * 2**24), 1 + np.floor(3 * u[..., TURN])
    columns = (sobel, noise * std, seed, rotate * quarters, top, left, cut * side)
    return np.concatenate([boxes * recrop[..., None], np.stack(columns, -1)], -1)


def erase_boxes(v: Views, u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the boxes to erase (..., V, 5): top, left, height and width in pixels, and a 24-bit seed for the noise.

    `u` (..., V, EXTRA_WIDTH or more) are uniform random numbers. A row is zero where nothing is erased or none of the
    TRIES boxes fits. Random erasing is by Zhong et al. 2020, arXiv:1708.04896."""
    side = v.size[:, None]
    area = side**2 * (ERASED[0] + (ERASED[1] - ERASED[0]) * u[..., :TRIES])
    aspect = np.exp(LOG_ASPECT[0] + (LOG_ASPECT[1] - LOG_ASPECT[0]) * u[..., TRIES : 2 * TRIES])
    h, w = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))  # (..., V, TRIES)
    fits = (h > 0) & (w > 0) & (h < side) & (w < side)
    first = fits.argmax(-1)[..., None]
    h, w = (np.take_along_axis(x, first, -1)[..., 0] for x in (h, w))
    top, left = (np.floor(u[..., i] * (v.size - x + 1)) for i, x in ((ERASE_Y, h), (ERASE_X, w)))
    box = np.stack([top, left, h, w, np.floor(u[..., NOISE] * 2**24)], -1)
    return box * (fits.any(-1) & (u[..., ERASE] < v.erasing))[..., None]


def stretch(ends: NDArray[np.float64], u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale uniform random numbers `u` (V, n) from [0, 1) to the intervals `ends` (V, 2)."""
    return ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * u
