"""Visualise a backbone's features: principal components of patches, nearest images, and matching patches.

The principal components follow figure 1 of Oquab et al. 2023 (DINOv2), arXiv:2304.07193. The ten most similar pairs of
patches, between two views of an image or between two images, follow figure 4 of Li et al. 2021 (EsViT),
arXiv:2106.09785."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data.index import Index, Note
from eagleray.models.backbone import Backbone
from eagleray.protocols.correspondence import matches
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import image, no_image_error, subset
from eagleray.protocols.image_batches import batches
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.visual import draw
from eagleray.views import photometric
from eagleray.views import sampling as drawing
from eagleray.views.crop import crop

BATCH = 32
EDGE = 0.01  # share of the patches whose colours are clipped at each end of a component
SCALE = (0.4, 0.6)  # area of the second view, as a share of the image


class Nearest(NamedTuple):
    """The k nearest neighbours of q queries, the nearest first."""

    rows: Tensor  # (q, k)
    cosine: Tensor  # (q, k)


@torch.inference_mode()
def components(
    backbone: Backbone, index: Index, *, out: Path, note: Note = print, size: PositiveInt = 448, images: PositiveInt = 6
) -> Outcome:
    """Draw the principal components of the patches of several images together.

    The first component separates foreground from background. The first three components of the foreground patches are
    then drawn as red, green and blue. A colour means the same in all images. Two percentages are measured: the share of
    the patches' variance in three components, and the share of foreground patches.

    Raises UserError when no image decodes."""
    crops, patches, grid = patch_features(backbone, index, images, size)
    scores, variance = principal(patches.flatten(0, 1), 3)
    first = oriented(scores[:, 0].view(len(patches), *grid))
    front = first > 0
    colours = torch.zeros(*front.shape, 3)
    colours[front] = spread(principal(patches.view(*front.shape, -1)[front], 3)[0])
    rows: dict[str, list[draw.Tile]] = {}
    for i, (picture, ramp) in enumerate(zip(crops, spread(first.flatten()[:, None]).view(first.shape), strict=True)):
        tiles = [
            draw.Tile(draw.pixels(picture)),
            draw.Tile(draw.heat_overlay(picture, ramp), "first component"),
        ]
        rows[f"image {i}"] = [
            *tiles,
            draw.Tile(draw.colour_overlay(picture, colours[i]), "components of the foreground"),
        ]
    out.mkdir(parents=True, exist_ok=True)
    path = draw.sheet(rows, out / "components.png", "Principal components of patches, of all images together")
    numbers = {"components/variance": 100 * variance, "components/foreground": 100 * front.float().mean().item()}
    note(
        f"components: three hold {numbers['components/variance']:.1f} % of the variance of {len(crops)} images' patches"
    )
    return Outcome(numbers, {"size": size, "images": len(crops), "grid": f"{grid[0]} x {grid[1]}"}, (path,))


def principal(x: Tensor, k: int) -> tuple[Tensor, float]:
    """Return the scores (n, k) of vectors (n, D) on their first k principal components, and the share of the variance
    that these explain.

    If there are fewer than k components, the other columns are zero. The sign of a component makes its largest weight
    positive."""
    centred = (x - x.mean(0)).double()
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    axes = vectors.flip(1)[:, :k]
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    scores = centred @ axes
    variance = values.flip(0)[:k].sum() / values.sum().clamp(min=1e-30)
    return F.pad(scores, (0, k - scores.shape[1])).float(), variance.clamp(0, 1).item()


def oriented(first: Tensor) -> Tensor:
    """Return the first component (B, h, w), whose mean is 0, with the sign that makes the foreground positive.

    The borders of images mostly show background. The sign that is rarer at the borders is therefore the foreground."""
    border = torch.ones_like(first, dtype=torch.bool)
    border[:, 1:-1, 1:-1] = False
    front = (first > 0).float()
    return first if front[border].mean() <= front[~border].mean() else -first


def spread(x: Tensor) -> Tensor:
    """Scale each column of values (n, k) to the range from 0 to 1, and clip the outermost values."""
    if not len(x):
        return x
    low, high = torch.quantile(x, torch.tensor([EDGE, 1 - EDGE], dtype=x.dtype), dim=0)
    return ((x - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)


@torch.inference_mode()
@in_eval_mode
def neighbours(
    backbone: Backbone,
    index: Index,
    *,
    out: Path,
    note: Note = print,
    size: PositiveInt = 224,
    limit: PositiveInt = 1000,
    queries: PositiveInt = 8,
    k: PositiveInt = 8,
) -> Outcome:
    """Draw a sheet of query images, each with the k images nearest to it by the cosine of pooled features.

    With labels, also measure the percentage of neighbours that have the query's class. These have a green frame.

    Raises UserError when fewer than two images decode."""
    device = next(backbone.parameters()).device
    samples: list[int] = []
    parts = []
    for rows_read, crops in batches(index, subset(np.arange(len(index)), limit), size, size, BATCH):
        samples += rows_read
        parts.append(backbone.pooled(photometric.normalise(crops, device)).float().cpu())
    if len(samples) < 2:
        raise UserError(f"{index.shards[0].url}: {len(samples)} images in these shards decode; expected 2 or more")
    chosen = torch.linspace(0, len(samples) - 1, min(queries, len(samples))).round().long()
    near = nearest(torch.cat(parts), chosen, k)
    labels = index.label[samples] if index.labelled else None
    rows: dict[str, list[draw.Tile]] = {}
    for query, others, cosines in zip(chosen.tolist(), near.rows.tolist(), near.cosine.tolist(), strict=True):
        tiles = [draw.Tile(read(index, samples[query], size), "query")]
        for other, cosine in zip(others, cosines, strict=True):
            edge = "" if labels is None else frame(labels[query], labels[other])
            tiles.append(draw.Tile(read(index, samples[other], size), f"cosine {cosine:.2f}", edge=edge))
        rows[f"image {samples[query]}\n{index.key(samples[query])[:12]}"] = tiles
    out.mkdir(parents=True, exist_ok=True)
    green = "; green: of the query's class" if labels is not None else ""
    title = f"The {near.rows.shape[1]} nearest of {len(samples)} images{green}"
    numbers = {"neighbours/cosine": near.cosine.mean().item()}
    if labels is not None:
        theirs, own = labels[near.rows.numpy()], labels[chosen.numpy()][:, None]
        if (known := (theirs >= 0) & (own >= 0)).any():
            numbers["neighbours/same_class"] = 100 * float((theirs == own)[known].mean())
    note(f"neighbours: {len(samples)} images, mean cosine {numbers['neighbours/cosine']:.3f}")
    settings = {"size": size, "images": len(samples), "queries": len(chosen), "k": near.rows.shape[1]}
    return Outcome(numbers, settings, (draw.sheet(rows, out / "neighbours.png", title),))


def frame(one: int, other: int) -> str:
    """Return the colour of the frame for the labels of a query and its neighbour; empty if either has no label."""
    return "" if min(one, other) < 0 else draw.GREEN if one == other else draw.RED


def nearest(x: Tensor, queries: Tensor, k: int) -> Nearest:
    """Find, for each of the vectors in rows `queries` (q,) of x (n, D), the k nearest other vectors."""
    unit = F.normalize(x, dim=1)
    cosine = unit[queries] @ unit.T
    cosine[torch.arange(len(queries)), queries] = -torch.inf
    values, order = cosine.sort(dim=1, descending=True, stable=True)
    k = min(k, len(x) - 1)
    return Nearest(order[:, :k], values[:, :k])


@torch.inference_mode()
def pairs(
    backbone: Backbone,
    index: Index,
    *,
    out: Path,
    note: Note = print,
    size: PositiveInt = 224,
    images: PositiveInt = 3,
    limit: PositiveInt = 64,
) -> Outcome:
    """Draw the ten most similar pairs of patches between two views of an image, and between two images.

    The second view of an image is a smaller and recoloured crop. The second image is the nearest of `limit` images. A
    match between two views is right if it is at most one patch away from the true position. Over these matches, the
    percentage of right ones and the mean distance in pixels are measured.

    Raises UserError when fewer than two images decode."""
    crops, patches, grid = patch_features(backbone, index, limit, size)
    if len(crops) < 2:
        raise UserError(f"{index.shards[0].url}: 1 image in these shards decodes; expected 2 or more")
    picked = range(min(images, len(crops)))
    second, boxes, flips = second_views(crops[: len(picked)], size)
    device = next(backbone.parameters()).device
    others = patches_of(backbone, second.to(device))
    near = nearest(patches.mean(1), torch.tensor(picked), 1).rows[:, 0].tolist()
    rows, errors = [], []
    reach = size / min(grid)
    for i, j in zip(picked, near, strict=True):
        ends = match_ends(patches[i], others[i], grid, size)
        error = np.linalg.norm(to_image(ends[:, 2:], boxes[i], bool(flips[i]), size) - ends[:, :2], axis=1)
        errors.append(error)
        title = f"image {i} and a view of it: {np.sum(error <= reach)} of {len(error)} within a patch"
        rows.append(draw.Pair(draw.pixels(crops[i]), denormalised_pixels(second[i]), ends, error <= reach, title))
        title = f"image {i} and the nearest of {len(crops)} by mean patch"
        ends = match_ends(patches[i], patches[j], grid, size)
        rows.append(draw.Pair(draw.pixels(crops[i]), draw.pixels(crops[j]), ends, None, title))
    out.mkdir(parents=True, exist_ok=True)
    path = draw.pairs(
        rows, out / "pairs.png", "The ten most similar patches; green: right, red: wrong, yellow: unknown"
    )
    numbers = {"pairs/right": 100 * float(np.mean(np.stack(errors) <= reach)), "pairs/error": float(np.mean(errors))}
    note(f"pairs: {numbers['pairs/right']:.0f} % right, {numbers['pairs/error']:.1f} pixels apart")
    return Outcome(numbers, {"size": size, "images": len(picked), "scale": SCALE}, (path,))


def match_ends(one: Tensor, other: Tensor, grid: tuple[int, int], size: int) -> NDArray[np.float64]:
    """Return the centres of the k most similar patches of two images (N, D), in pixels.

    Each row of the result (k, 4) is x and y in the first image, then x and y in the second."""
    match = matches(one, other)
    at = [((patch % grid[1] + 0.5) * size / grid[1], (patch // grid[1] + 0.5) * size / grid[0])
          for patch in (match.one, match.other)]  # fmt: skip
    return torch.stack([x for point in at for x in point], 1).double().cpu().numpy()


def to_image(points: NDArray[np.float64], box: NDArray[np.int64], mirrored: bool, size: int) -> NDArray[np.float64]:
    """Map points of a view to the image from which the view was cropped. Points (k, 2) are x and y in pixels.

    `box` is the crop as top, left, height and width; `mirrored` is whether the view is mirrored, and `size` its side.
    """
    top, left, height, width = box
    x = size - points[:, 0] if mirrored else points[:, 0]
    return np.stack([left + x * width / size, top + points[:, 1] * height / size], 1)


def second_views(crops: Tensor, size: int) -> tuple[Tensor, NDArray[np.int64], Tensor]:
    """Crop another view from each normalised image (B, 3, S, S).

    Returns the views, their boxes (B, 4), which are top, left, height and width in pixels, and whether each view is
    mirrored (B,). The views are random, but the same in every call."""
    view = View(size=size, scale=SCALE)
    kind = drawing.Views.of([view])
    u = np.stack([drawing.uniforms(1, seed=0, epoch=0, sample=i) for i in range(len(crops))])  # (B, 1, WIDTH)
    boxes = np.concatenate([drawing.crops(kind, row, size, size) for row in u])
    views = torch.empty_like(crops)
    for image_, box, view_ in zip(crops, boxes, views, strict=True):
        crop(image_, box[None], [view], [view_])
    params = torch.from_numpy(drawing.photometrics(kind, u)[:, 0])
    return photometric.apply(views, params), boxes, params[:, photometric.FLIP] > 0


def denormalised_pixels(x: Tensor) -> draw.Pixels:
    """Undo the normalisation of a view (3, S, S) and return its pixels."""
    mean, std = (photometric.per_channel(v, torch.device("cpu")) for v in (photometric.MEAN, photometric.STD))
    return draw.pixels(((x.cpu() * std + mean).clamp(0, 1) * 255).byte())


@in_eval_mode
def patch_features(backbone: Backbone, index: Index, images: int, size: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return n images (n, 3, S, S), uint8, the features of their patches (n, N, D), and the grid of the patches.

    Raises UserError when no image decodes."""
    device = next(backbone.parameters()).device
    images_, patches, grid = [], [], (0, 0)
    for _, crops in batches(index, subset(np.arange(len(index)), images), size, size, 8):
        features = backbone(photometric.normalise(crops, device))
        images_.append(crops)
        patches.append(features.patches.float().cpu())
        grid = features.grid
    if not images_:
        raise no_image_error(index)
    return torch.cat(images_), torch.cat(patches), grid


@in_eval_mode
def patches_of(backbone: Backbone, x: Tensor) -> Tensor:
    """Return the features of the patches (B, N, D), on the CPU, for normalised images (B, 3, H, W)."""
    return backbone(x).patches.float().cpu()


def read(index: Index, sample: int, size: int) -> draw.Pixels:
    """Read the centre crop of a sample that is known to decode."""
    picture = image(index, sample, size, size)
    assert picture is not None  # it decoded a moment ago
    return draw.pixels(picture)
