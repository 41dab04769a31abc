"""Visualise the patch features of a backbone: their principal components, and matching patches.

Principal components are drawn as in figure 1 of Oquab et al. 2023 (DINOv2), arXiv:2304.07193. The ten most similar
pairs of patches, of two views of an image or of two images, are drawn as in figures 5 and 9 of Li et al. 2021 (EsViT),
arXiv:2106.09785."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base.errors import UserError, explained
from eagleray.config.view import View
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone, Features
from eagleray.protocols.catalogue import Components, Pairs
from eagleray.protocols.correspondence import matches
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import no_image_error, subset
from eagleray.protocols.image_batches import batches
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Workspace
from eagleray.protocols.visual import draw
from eagleray.protocols.visual.neighbours import nearest
from eagleray.views import photometric
from eagleray.views import sampling as drawing
from eagleray.views.colours import MEAN, STD
from eagleray.views.crop import centre_crop, crop

EDGE = 0.01  # share of the values of a component that are clipped at either end
SCALE = (0.4, 0.6)  # area of the second view, as a share of the image
TITLE = "The ten most similar patches, by rank."
MARKS = "Blue dot, red triangle: the region nearest to the global feature of the image itself, of the other one."


@torch.inference_mode()
def components(backbone: Backbone, index: Index, settings: Components, workspace: Workspace) -> Outcome:
    """Draw the principal components of the patches of several images, computed for all of them together.

    The first component separates foreground from background. The first three components of the foreground patches are
    then drawn as red, green and blue, so that a colour means the same in all images. Two percentages are measured: the
    share of the patches' variance that three components explain, and the share of foreground patches. Raises UserError
    when no image decodes."""
    crops, (_, patches, grid) = patch_features(backbone, index, settings.images, settings.size)
    first, front, colours, variance = coloured(patches, grid)
    rows: dict[str, list[draw.Tile]] = {}
    for i, (picture, ramp) in enumerate(zip(crops, spread(first.flatten()[:, None]).view(first.shape), strict=True)):
        tiles = [draw.Tile(draw.pixels(picture)), draw.Tile(draw.heat_overlay(picture, ramp), "first component")]
        rows[f"image {i}"] = [
            *tiles,
            draw.Tile(draw.colour_overlay(picture, colours[i]), "components of the foreground"),
        ]
    path = draw.sheet(rows, workspace.out / "components.png", "Principal components of patches, of all images together")
    numbers = {"components/variance": 100 * variance, "components/foreground": 100 * front.float().mean().item()}
    workspace.note(
        f"components: three hold {numbers['components/variance']:.1f} % of the variance of {len(crops)} images' patches"
    )
    details = {"size": settings.size, "images": len(crops), "grid": f"{grid[0]} x {grid[1]}"}
    return Outcome(numbers, details, (path,))


def coloured(patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return the first principal component (B, h, w) of the patches (B, N, D) of B images, a mask of the foreground (B,
    h, w), colours (B, h, w, 3), which are black in the background, and the share of the variance that three components
    explain."""
    scores, variance = principal(patches.flatten(0, 1), 3)
    first = oriented(scores[:, 0].view(len(patches), *grid))
    front = first > 0
    colours = torch.zeros(*front.shape, 3)
    colours[front] = spread(principal(patches.view(*front.shape, -1)[front], 3)[0])
    return first, front, colours, variance


def principal(x: Tensor, k: int) -> tuple[Tensor, float]:
    """Return the scores (n, k) of vectors x (n, D) on k principal components, and the share of variance that they
    explain.

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
    """Return the first component (B, h, w), whose mean is 0, with the sign that makes it positive in the foreground.

    Borders of images mostly show background, so the foreground has the sign that is rarer at borders than inside."""
    border = torch.ones_like(first, dtype=torch.bool)
    border[:, 1:-1, 1:-1] = False
    front = (first > 0).float()
    return first if front[border].mean() <= front[~border].mean() else -first


def spread(x: Tensor) -> Tensor:
    """Scale each column of values (n, k) to the range from 0 to 1. A share EDGE of the values is clipped at either
    end."""
    if not len(x):
        return x
    low, high = torch.quantile(x, torch.tensor([EDGE, 1 - EDGE], dtype=x.dtype), dim=0)
    return ((x - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)


@torch.inference_mode()
def pairs(backbone: Backbone, index: Index, settings: Pairs, workspace: Workspace) -> Outcome:
    """Draw the ten most similar pairs of patches between two views of an image, and between two images.

    The second view of an image is a smaller and recoloured crop. The second image is the one of `limit` images that is
    nearest to the first. A match between views is right if it is at most a patch away from the true position. The
    percentage of right matches and their mean distance in pixels are measured. If `one` and `other` name two images, by
    file or by key of a sample, these get a picture of their own. Raises UserError when fewer than two images decode, or
    when `one` or `other` cannot be read."""
    size, one, other = settings.size, settings.one, settings.other
    own = own_pair(index, one, other, size)
    crops, features = patch_features(backbone, index, settings.limit, size)
    if len(crops) < 2:
        raise UserError(f"{index.shards[0].url}: 1 image in these shards decodes; expected 2 or more")
    picked = range(min(settings.images, len(crops)))
    second, boxes, flips = second_views(crops[: len(picked)], size)
    views = features_of(backbone, second)
    near = nearest(features.patches.mean(1), torch.tensor(picked), 1).rows[:, 0].tolist()
    rows, errors = [], []
    reach = size / min(features.grid)
    for i, j in zip(picked, near, strict=True):
        pair = matched(features, i, views, i, crops[i], denormalised(second[i]))
        error = np.linalg.norm(to_image(pair.ends[:, 2:], boxes[i], bool(flips[i]), size) - pair.ends[:, :2], axis=1)
        errors.append(error)
        title = f"image {i} and a view of it: {np.sum(error <= reach)} of {len(error)} within a patch"
        rows.append(pair._replace(right=error <= reach, title=title))
        title = f"image {i} and the nearest of {len(crops)} by mean patch"
        rows.append(matched(features, i, features, j, crops[i], crops[j])._replace(title=title))
    out = workspace.out
    drawn = [draw.pairs(rows, out / "pairs.png", f"{TITLE} Green: right, red: wrong, yellow: unknown. {MARKS}")]
    if own is not None:
        two = features_of(backbone, photometric.normalise(own, torch.device("cpu")))
        pair = matched(two, 0, two, 1, *own)._replace(title=f"{Path(one).name} and {Path(other).name}")
        drawn.append(draw.pairs([pair], out / "pairs-own.png", f"{TITLE} {MARKS}", side=2.4 * draw.SIDE))
    numbers = {"pairs/right": 100 * float(np.mean(np.stack(errors) <= reach)), "pairs/error": float(np.mean(errors))}
    workspace.note(f"pairs: {numbers['pairs/right']:.0f} % right, {numbers['pairs/error']:.1f} pixels apart")
    return Outcome(numbers, {"size": size, "images": len(picked), "scale": SCALE}, tuple(drawn))


def own_pair(index: Index, one: str, other: str, size: int) -> Tensor | None:
    """Return the centre crops (2, 3, size, size), uint8, of the images `one` and `other`; None if both names are empty.

    Each names a file or a sample by key. Raises UserError when one is not given, is missing or does not decode."""
    if not one and not other:
        return None
    if not one or not other:
        given, missing = ("one", "other") if one else ("other", "one")
        raise UserError(f"--{given} {one or other}: expected two images; --{missing} names the second")
    return torch.stack([own_image(index, f"--{name}", value, size) for name, value in (("one", one), ("other", other))])


def own_image(index: Index, option: str, name: str, size: int) -> Tensor:
    """Return the centre crop (3, size, size) of the file `name` or, if there is none, of the sample with this key.

    Raises UserError, which names the `option`, when there is neither, or the image does not decode."""
    if Path(name).is_file():
        data: bytes | memoryview = Path(name).read_bytes()
    else:
        found = (int(index.first[shard]) + keys.index(name) for shard in range(len(index.shards))
                 if name in (keys := index.column(shard, ["key"])["key"].to_pylist()))  # fmt: skip
        sample = next(found, None)
        if sample is None:
            raise UserError(f"{option} {name}: neither an image file nor the key of a sample of these shards")
        data = index.read(sample, sample + 1)
    with explained(f"{option} {name}", BadImage):
        return centre_crop(decode(data), resize=size, size=size)


def matched(one: Features, i: int, other: Features, j: int, image: Tensor, second: Tensor) -> draw.Pair:
    """Return `image` and `second` (3, S, S), whose features are one[i] and other[j], with their matching patches.

    The pair also has, for the global feature of each image, the nearest region in both images."""
    size, each = image.shape[1], [(one, i), (other, j)]
    ends = match_ends(one.patches[i], other.patches[j], one.grid, size)
    nearest_regions = [
        [centres(region(f.patches[n], to.pooled[m])[None], f.grid, size) for f, n in each] for to, m in each
    ]
    marks = torch.stack([torch.cat(regions, 1)[0] for regions in nearest_regions]).numpy()
    return draw.Pair(draw.pixels(image), draw.pixels(second), ends, None, "", marks)


def region(patches: Tensor, feature: Tensor) -> Tensor:
    """Return the index of the patch of `patches` (N, D) that is nearest to a global feature (D,) by the cosine."""
    return (F.normalize(patches, dim=-1) @ F.normalize(feature, dim=-1)).argmax()


def match_ends(one: Tensor, other: Tensor, grid: tuple[int, int], size: int) -> NDArray[np.float64]:
    """Return the centres (k, 4) in pixels of the k most similar pairs of patches of two images, `one` and `other` (N,
    D).

    Each row is x and y in the first image, then x and y in the second."""
    match = matches(one, other)
    return torch.cat([centres(patch, grid, size) for patch in (match.one, match.other)], 1).numpy()


def centres(patch: Tensor, grid: tuple[int, int], size: int) -> Tensor:
    """Return the centres (k, 2), x and y in pixels, of the patches (k,) in a square image of `size` pixels."""
    x, y = (patch % grid[1] + 0.5) * size / grid[1], (patch // grid[1] + 0.5) * size / grid[0]
    return torch.stack([x, y], 1).double().cpu()


def to_image(points: NDArray[np.float64], box: NDArray[np.int64], mirrored: bool, size: int) -> NDArray[np.float64]:
    """Map `points` (k, 2), x and y in pixels, from a view to the image from which the view was cropped.

    `box` is the crop as top, left, height and width. `mirrored` is whether the view is mirrored. `size` is its side."""
    top, left, height, width = box
    x = size - points[:, 0] if mirrored else points[:, 0]
    return np.stack([left + x * width / size, top + points[:, 1] * height / size], 1)


def second_views(crops: Tensor, size: int) -> tuple[Tensor, NDArray[np.int64], Tensor]:
    """Return random views of normalised images (B, 3, S, S), the same views in every call.

    Also returns their crops (B, 4) as top, left, height and width in pixels, and whether each view is mirrored (B,)."""
    view = View(size=size, scale=SCALE)
    kind = drawing.Views.of([view])
    u = np.stack([drawing.uniforms(1, seed=0, epoch=0, sample=i) for i in range(len(crops))])  # (B, 1, WIDTH)
    boxes = np.concatenate([drawing.crops(kind, row, size, size) for row in u])
    views = torch.empty_like(crops)
    for image_, box, view_ in zip(crops, boxes, views, strict=True):
        crop(image_, box[None], [view], [view_])
    params = torch.from_numpy(drawing.photometrics(kind, u)[:, 0])
    return photometric.apply(views, params), boxes, params[:, photometric.FLIP] > 0


def denormalised(x: Tensor) -> Tensor:
    """Undo the normalisation of a view (3, S, S), and return its pixels as uint8."""
    mean, std = (photometric.per_channel(v, torch.device("cpu")) for v in (MEAN, STD))
    return ((x.cpu() * std + mean).clamp(0, 1) * 255).byte()


@in_eval_mode
def patch_features(backbone: Backbone, index: Index, images: int, size: int) -> tuple[Tensor, Features]:
    """Return at most `images` centre crops (n, 3, S, S), uint8, drawn from an index, and their features on the CPU.

    Raises UserError when no image decodes."""
    parts = [(crops, features_of(backbone, photometric.normalise(crops, torch.device("cpu"))))
             for _, crops in batches(index, subset(np.arange(len(index)), images), size, size, 8)]  # fmt: skip
    if not parts:
        raise no_image_error(index)
    pooled, patches = (torch.cat([getattr(f, name) for _, f in parts]) for name in ("pooled", "patches"))
    return torch.cat([crops for crops, _ in parts]), Features(pooled, patches, parts[0][1].grid)


@in_eval_mode
def features_of(backbone: Backbone, x: Tensor) -> Features:
    """Return the features of normalised images (B, 3, H, W), as float32 on the CPU."""
    pooled, patches, grid = backbone(x.to(next(backbone.parameters()).device))
    return Features(pooled.float().cpu(), patches.float().cpu(), grid)
