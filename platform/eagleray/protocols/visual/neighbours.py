"""Draw query images beside the images that are nearest to them by the features of a backbone."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import image, subset
from eagleray.protocols.image_batches import batches
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.visual import draw
from eagleray.views import photometric

if TYPE_CHECKING:
    from eagleray.protocols.catalogue import Neighbours
    from eagleray.protocols.protocol import Workspace

BATCH = 32


class Nearest(NamedTuple):
    """The k nearest neighbours of q queries, the nearest first."""

    rows: Tensor  # (q, k) row of each neighbour in the table of features
    cosine: Tensor  # (q, k) cosine of each neighbour and its query


def neighbours(backbone: Backbone, index: Index, settings: "Neighbours", workspace: "Workspace") -> Outcome:
    """Draw a sheet of query images, each with the k images nearest to it by the cosine of pooled features.

    With labels, also measure the percentage of neighbours with their query's class; these have a green frame, others a
    red one. Raises UserError when fewer than two images decode."""
    images = subset(np.arange(len(index)), settings.limit)
    path, size = workspace.out / "neighbours.png", settings.size
    numbers, details = draw_neighbours(backbone, index, images, path, size=size, queries=settings.queries, k=settings.k)
    workspace.note(f"neighbours: {details['images']} images, mean cosine {numbers['cosine']:.3f}")
    return Outcome({f"neighbours/{name}": value for name, value in numbers.items()}, details, (path,))


@torch.inference_mode()
@in_eval_mode
def draw_neighbours(
    backbone: Backbone, index: Index, images: NDArray[np.int64], path: Path, *, size: int, queries: int, k: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Draw `queries` of the samples `images`, evenly spread, into a file, each with its k nearest of all `images`.

    Returns the numbers and settings of `neighbours`. Raises UserError when fewer than two images decode."""
    device = next(backbone.parameters()).device
    samples: list[int] = []
    parts = []
    for rows_read, crops in batches(index, images, size, size, BATCH):
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
    green = "; green: of the query's class" if labels is not None else ""
    draw.sheet(rows, path, f"The {near.rows.shape[1]} nearest of {len(samples)} images{green}")
    numbers = {"cosine": near.cosine.mean().item()}
    if labels is not None:
        theirs, own = labels[near.rows.numpy()], labels[chosen.numpy()][:, None]
        if (known := (theirs >= 0) & (own >= 0)).any():
            numbers["same_class"] = 100 * float((theirs == own)[known].mean())
    return numbers, {"size": size, "images": len(samples), "queries": len(chosen), "k": near.rows.shape[1]}


def frame(one: int, other: int) -> str:
    """Return the colour of a neighbour's frame: green for equal labels, red for others, empty if a label is missing."""
    return "" if min(one, other) < 0 else draw.GREEN if one == other else draw.RED


def nearest(x: Tensor, queries: Tensor, k: int) -> Nearest:
    """Return the k nearest other rows of x (n, D), by the cosine, for each of the rows `queries` (q,)."""
    unit = F.normalize(x, dim=1)
    cosine = unit[queries] @ unit.T
    cosine[torch.arange(len(queries)), queries] = -torch.inf
    values, order = cosine.sort(dim=1, descending=True, stable=True)
    k = min(k, len(x) - 1)
    return Nearest(order[:, :k], values[:, :k])


def read(index: Index, sample: int, size: int) -> draw.Pixels:
    """Read the centre crop of a sample that is known to decode."""
    picture = image(index, sample, size, size)
    assert picture is not None  # it decoded when its features were computed
    return draw.pixels(picture)
