"""Read images with a class for every pixel from folders in one of three layouts, and crop them as mmsegmentation does.

Two layouts are those of ADE20K and of CamVid (as published with SegNet). The third has folders of images and folders of
masks with the same names."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from eagleray.base.errors import UserError, explained
from eagleray.data.decode import BadImage, decode
from eagleray.data.pixels import decoding, open_allowed
from eagleray.storage.ordered_map import ordered_map
from eagleray.views import photometric

IGNORED = 255  # value that marks pixels without a class
NO_CLASS = ("unlabelled", "unlabeled", "void", "ignore")  # names in classes.txt that mark pixels without a class
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
WIDEST = 4  # largest long side relative to `size`, as in mmsegmentation's (2048, 512)
RATIOS = (0.5, 2.0)  # range of the short side in training, relative to `size`
LARGEST, TRIES = 0.75, 10  # largest share of one class in a crop; largest number of attempts to draw such a crop
# Ranges of the factors of brightness and saturation, and of the shift of the hue; each applies to half of the images.
JITTER = ((photometric.brightness, 0.875, 1.125), (photometric.saturation, 0.5, 1.5), (photometric.hue, -0.1, 0.1))


class Layout(NamedTuple):
    """The folders (images, masks) for training and for validation, and how the values of a mask number the classes."""

    train: tuple[str, str]
    val: tuple[str, str]
    first: int = 0  # value of the first class in a mask; pixels with smaller values have no class
    classes: int | None = None  # number of classes if no file names them; None: from the values in training masks


LAYOUTS = (
    Layout(("images/training", "annotations/training"), ("images/validation", "annotations/validation"), 1, 150),
    Layout(("images/train", "masks/train"), ("images/val", "masks/val")),
    Layout(("train", "trainannot"), ("val", "valannot")),
)


class Pair(NamedTuple):
    """The files of an image and of its mask."""

    image: Path
    mask: Path


@dataclass(frozen=True)
class Masks:
    """A dataset for semantic segmentation with C classes: pairs of an image and a mask with the class of each pixel."""

    train: tuple[Pair, ...]
    val: tuple[Pair, ...]
    classes: tuple[str, ...]
    table: NDArray[np.int16]  # (256,) class of each value in a mask; IGNORED: no class; -1: wrong value

    @classmethod
    def of(cls, folder: Path) -> "Masks":
        """Open a dataset in one of the three layouts.

        Raises UserError when the folder has none of these layouts or an image has no mask."""
        layout = next((lay for lay in LAYOUTS if all((folder / f).is_dir() for f in (*lay.train, *lay.val))), None)
        if layout is None:
            known = "; or ".join(", ".join((*lay.train, *lay.val)) for lay in LAYOUTS)
            raise UserError(f"--masks {folder}: expected the folders {known}")
        train, val = pairs(folder, *layout.train), pairs(folder, *layout.val)
        names = class_names(folder) or [str(i) for i in range(layout.classes or highest(train) + 1)]
        table = np.full(256, -1, np.int16)
        table[: layout.first] = table[IGNORED] = IGNORED
        classes = [name for name in names if name.lower() not in NO_CLASS]
        if not 2 <= len(classes) < IGNORED:
            raise UserError(f"--masks {folder}: {len(classes)} classes; expected 2 to {IGNORED - 1}")
        numbers = itertools.count()
        for value, name in enumerate(names, layout.first):
            table[value] = IGNORED if name.lower() in NO_CLASS else next(numbers)
        return cls(train, val, tuple(classes), table)

    def read(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Read an image (3, H, W), uint8, and the classes of its pixels (H, W), uint8.

        Raises UserError when a file does not decode, when image and mask differ in size, or when a value in the mask
        does not stand for a class."""
        with explained(str(pair.image), BadImage):
            image = decode(pair.image.read_bytes())
        values = read_mask(pair.mask)
        if values.shape != image.shape[1:]:
            (h, w), (_, height, width) = values.shape, image.shape
            raise UserError(f"{pair.mask}: has {w} x {h} pixels, its image has {width} x {height}")
        classes = np.where((values < 0) | (values > IGNORED), -1, self.table[values.clip(0, IGNORED)])
        if (classes < 0).any():
            worst = int(values[classes < 0].max())
            raise UserError(
                f"{pair.mask}: has the value {worst}, which is not the number of any of the {len(self.classes)} classes"
            )
        return image, torch.from_numpy(classes.astype(np.uint8))


def pairs(folder: Path, images: str, masks: str) -> tuple[Pair, ...]:
    """Pair each image of one folder with the mask of the same name in another. Hidden files are left out.

    Raises UserError when there is no image, or an image has no mask."""
    known = {part: sorted(p for p in (folder / part).iterdir() if p.name[0] != ".") for part in (images, masks)}
    by_name = {p.stem: p for p in known[masks] if p.suffix.lower() in SUFFIXES}
    out = []
    for image in (p for p in known[images] if p.suffix.lower() in SUFFIXES):
        if image.stem not in by_name:
            raise UserError(f"{image}: no mask in {folder / masks} has the same name")
        out.append(Pair(image, by_name[image.stem]))
    if not out:
        raise UserError(f"{folder / images}: expected images, found none")
    return tuple(out)


def class_names(folder: Path) -> list[str]:
    """Return the class names in classes.txt, one in each line, or in ADE20K's list; none if there is no such file."""
    if (path := folder / "classes.txt").is_file():
        with explained(f"{path}: not UTF-8 text", UnicodeDecodeError, why=False):
            return [line.strip() for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    if (path := folder / "objectInfo150.txt").is_file():
        return [line.split("\t")[-1].split(",")[0].strip() for line in path.read_text().splitlines()[1:]]
    return []


def highest(train: Sequence[Pair]) -> int:
    """Return the highest value in the training masks, apart from IGNORED."""
    return max(int(np.where(v == IGNORED, 0, v).max()) for v in ordered_map(read_mask, [p.mask for p in train]))


def read_mask(path: Path) -> NDArray[np.int64]:
    """Read the values (H, W) of a mask.

    Raises UserError when the file does not decode or has more than one channel."""
    with explained(str(path), BadImage), decoding(), open_allowed(path.read_bytes()) as mask:
        values = np.asarray(mask)
    if values.ndim != 2:
        raise UserError(f"{path}: has {values.shape[2]} channels; expected one, the class of each pixel")
    return values.astype(np.int64)


def resized_shape(image: Tensor, size: int, ratio: float = 1.0) -> tuple[int, int]:
    """Return the height and width to which an image (..., H, W) is resized.

    The short side becomes `ratio` * `size`, or less if the long side would exceed WIDEST * `ratio` * `size`."""
    short, long = sorted(image.shape[-2:])
    scale = ratio * size * min(1 / short, WIDEST / long)
    return max(round(image.shape[-2] * scale), 1), max(round(image.shape[-1] * scale), 1)


def crop(image: Tensor, mask: Tensor, rng: np.random.Generator, *, size: int) -> tuple[Tensor, Tensor]:
    """Return a random training crop of an image (3, H, W), uint8, and of the classes `mask` (H, W) of its pixels.

    Image and classes are resized and mirrored at random, and the colours of the image are distorted. The results are a
    normalised image (3, size, size) and its classes (size, size). Where the resized image is smaller, it is padded at
    the bottom and on the right with zeros, and its classes with IGNORED."""
    shape = list(resized_shape(image, size, rng.uniform(*RATIOS)))
    image = resize(image, shape, InterpolationMode.BILINEAR, antialias=True)
    mask = resize(mask[None], shape, InterpolationMode.NEAREST_EXACT)[0]
    for _ in range(TRIES):
        top, left = (int(rng.integers(max(n - size, 0) + 1)) for n in shape)
        part = mask[top : top + size, left : left + size]
        counts = torch.bincount(part[part != IGNORED].flatten())
        if (counts > 0).sum() > 1 and counts.max() < LARGEST * counts.sum():
            break
    x = image[None, :, top : top + size, left : left + size].float() / 255
    x = photometric.normalise_(distort(x, rng))[0]
    if rng.integers(2):
        x, part = x.flip(-1), part.flip(-1)
    room = (0, size - x.shape[2], 0, size - x.shape[1])
    return F.pad(x, room), F.pad(part, room, value=IGNORED)


def distort(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Distort the colours of an image (1, 3, h, w), with values from 0 to 1, at random.

    The contrast changes either before or after saturation and hue."""
    contrast = (photometric.contrast, 0.5, 1.5)
    order = (JITTER[0], contrast, *JITTER[1:]) if rng.integers(2) else (*JITTER, contrast)
    for function, low, high in order:
        if rng.integers(2):
            x = function(x, torch.tensor([rng.uniform(low, high)], dtype=x.dtype))
    return x


def crops(
    masks: Masks, *, start: int, stop: int, batch: int, rows: range, size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's `rows` of the training batches of the steps from `start` to `stop` - 1.

    These are crops (B, 3, size, size) and their classes (B, size, size), int64. Every epoch visits all training images
    in a new order. A step's batch does not depend on `start`. Raises UserError when an image or a mask cannot be
    read."""
    n = len(masks.train)

    def load(k: int) -> tuple[Tensor, Tensor]:
        sample = np.random.default_rng((seed, k // n)).permutation(n)[k % n]
        return crop(*masks.read(masks.train[sample]), np.random.default_rng((seed, 1, k)), size=size)

    loaded = ordered_map(load, (step * batch + row for step in range(start, stop) for row in rows))
    for _ in range(start, stop):
        images, classes = zip(*itertools.islice(loaded, len(rows)), strict=True)
        yield torch.stack(images), torch.stack(classes).long()
