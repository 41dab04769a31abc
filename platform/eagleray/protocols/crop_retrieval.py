"""Measure a backbone without labels by two crops of each image: how often the second finds the first, and LiDAR.

Finding crops is instance discrimination as a test: Wu et al. 2018, arXiv:1805.01978, section 3. LiDAR is the rank of
linear discriminant analysis with images as classes: Thilak et al. 2023, arXiv:2312.04000, section 4. docs/evaluate.md
has the rank correlations of both with kNN accuracy."""

import zlib
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base import dist
from eagleray.config.types import Format
from eagleray.data.index import Index
from eagleray.engine.precision import autocast
from eagleray.models.backbone import Backbone
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import own_samples
from eagleray.protocols.image_batches import THREADS, Reading, batches
from eagleray.views.photometric import normalise

PARTS = 5  # parts of the images, one of which the jackknife leaves out at a time
RIDGE = 1e-4  # LiDAR's ridge, added to the diagonal of the covariance of crops, as in the paper
AREA = 0.2, 1.0  # range of a crop's area, as a share of the centre square


def measure_crops(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    *,
    size: int,
    resize: int,
    precision: Format = "auto",
    reading: Reading = THREADS,
) -> tuple[float, float, float] | None:
    """Return how often, in percent, the second crop of an image finds the first, then LiDAR and its standard error.

    A second crop finds the first crop of its image if no other image's first crop is nearer, by the cosine of pooled
    features. Crops of `size` pixels are cut from the centre square of the image with its short side at `resize`. They
    depend on the sample alone, so that all backbones see the same crops. Each rank embeds a share of the samples.
    Returns None if fewer than PARTS samples decode. Called by all ranks together."""
    embed = partial(features_of_crops, backbone, index, own_samples(samples), size, resize, precision, reading)
    mine = dist.together(embed)
    pairs = dist.gather(mine, dist.gather_objects(len(mine)))
    if len(pairs) < PARTS:
        return None
    return dist.from_rank_zero(partial(numbers, pairs.nan_to_num(0, 0, 0)))


@torch.no_grad()
def numbers(pairs: Tensor) -> tuple[float, float, float]:
    """Return the percentage of second crops that find the first, LiDAR, and LiDAR's standard error.

    `pairs` (n, 2, D) are features of two crops of n images. The error is that of a jackknife over PARTS parts of
    them."""
    first, second = F.normalize(pairs, dim=2).unbind(1)
    x = pairs.double().cpu()
    part = torch.arange(len(x)) % PARTS
    without = torch.tensor([lidar(x[part != i]) for i in range(PARTS)])
    error = ((PARTS - 1) * without.var(correction=0)).sqrt()
    return share_found(first, second), lidar(x), float(error)


def share_found(first: Tensor, second: Tensor) -> float:
    """Return the percentage of second crops whose nearest first crop is of the same image. `first` and `second` (n, D)
    are the crops' features of unit length."""
    own = (second @ first.T).argmax(1) == torch.arange(len(first), device=first.device)
    return 100 * int(own.sum()) / len(first)


def lidar(x: Tensor) -> float:
    """Return LiDAR of the features (n, 2, D), float64, of two crops of each image: a number from 1 to D.

    The covariance between images is whitened by the covariance between the crops of an image. LiDAR is the exponential
    of the entropy of its normalised eigenvalues."""
    within = (x[:, 0] - x[:, 1]).T @ (x[:, 0] - x[:, 1]) / (2 * len(x))
    root = torch.linalg.cholesky(within + RIDGE * torch.eye(x.shape[2], dtype=x.dtype))
    between = torch.cov(x.mean(1).T).reshape(x.shape[2], -1)
    half = torch.linalg.solve_triangular(root, between, upper=False)
    p = torch.linalg.eigvalsh(torch.linalg.solve_triangular(root, half.T, upper=False)).clamp(min=0)
    p = p / p.sum().clamp(min=torch.finfo(p.dtype).tiny)
    return float(torch.exp(-torch.xlogy(p, p).sum()))


@in_eval_mode
@torch.no_grad()
def features_of_crops(
    backbone: Backbone,
    index: Index,
    samples: NDArray[np.int64],
    size: int,
    resize: int,
    precision: Format,
    reading: Reading,
) -> Tensor:
    """Return the pooled features (n, 2, D) of two crops of each sample that decodes, on the backbone's device."""
    device = next(backbone.parameters()).device
    parts = [torch.empty(0, 2, backbone.dim, device=device)]
    for rows, images in batches(index, samples, resize, resize, reading=reading):
        views = []
        for number in range(2):
            x = normalise(random_crops(images, rows, size, number), device)
            with autocast(device, precision):
                views.append(backbone.pooled(x).float())
        parts.append(torch.stack(views, 1))
    return torch.cat(parts)


def random_crops(images: Tensor, samples: list[int], size: int, number: int) -> Tensor:
    """Return a random square crop (b, 3, size, size) of each image (b, 3, S, S), uint8.

    Equal indices `samples` and an equal `number` give equal crops; `number` differs between the crops of a sample."""
    side, out = images.shape[-1], []
    for sample, image in zip(samples, images, strict=True):
        draw = np.random.default_rng([zlib.crc32(b"crop"), number, sample])
        edge = max(round(side * draw.uniform(*AREA) ** 0.5), 1)
        top, left = draw.integers(0, side - edge + 1, 2).tolist()
        part = image[None, :, top : top + edge, left : left + edge].float()
        resized = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True)
        out.append(resized.round().clamp(0, 255).byte())
    return torch.cat(out)
