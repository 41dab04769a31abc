"""Measure how often a backbone matches a patch of an image to the same patch in its mirrored and recoloured copy.

This is the correspondence benchmark of EsViT, Li et al. 2021, arXiv:2106.09785, section 2.1 and appendix C.7. No labels
are needed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import dist
from eagleray.config.view import View
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.catalogue import Correspondence
from eagleray.protocols.eval_mode import in_eval_mode
from eagleray.protocols.features import no_image_error, subset
from eagleray.protocols.image_batches import batches
from eagleray.protocols.outcome import Outcome
from eagleray.views import photometric, sampling

PAIRS, TOKENS = 10, 49  # in the paper, 10 pairs of an image with 49 patches count
BATCH = 128  # images in a batch; the backbone gets two views of each
# The paper's text names RandomGrayscale, but its results are of the authors' code, which turns all mirrored views grey.
MIRRORED = sampling.Views.of([View(flip=1.0, jitter=0.8, gray=1.0)])


class Matches(NamedTuple):
    """The k most similar pairs of patches of two images, the most similar first."""

    one: Tensor  # (..., k) indices of the matched patches of the first image
    other: Tensor  # (..., k) index of the patch in the second image that is matched to each
    cosine: Tensor  # (..., k) cosine similarity of each pair


def matches(one: Tensor, other: Tensor, k: int = PAIRS) -> Matches:
    """Match each patch of `one` (..., N, D) to the nearest of `other` (..., M, D), and return the k most similar pairs.

    If N is smaller than k, all pairs are returned. Among equally similar patches the first wins, so the result is
    deterministic."""
    nearest = (F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).mT).max(-1)
    cosine, order = (x[..., :k] for x in nearest.values.sort(dim=-1, descending=True, stable=True))
    return Matches(order, nearest.indices.gather(-1, order), cosine)


def pairs_of(patches: int) -> int:
    """Return how many pairs of an image count: PAIRS or, if it has fewer than TOKENS patches, proportionally fewer."""
    return min(PAIRS, max(1, round(PAIRS * patches / TOKENS)))


def scores(one: Tensor, other: Tensor, grid: tuple[int, int], size: Sequence[int], k: int | None = None) -> Tensor:
    """Return accuracy and error (..., 2) of the k most similar matches between the patches of an image and its mirror
    image.

    `one` and `other` (..., N, D) are the patches of the two images, `size` is their (H, W), and k is `pairs_of(N)` by
    default. A match is right if it is the patch at the mirrored position. The error is the distance in pixels between
    the centres of the matched and the right patch."""
    h, w = grid
    pairs = matches(one, other, k or pairs_of(h * w))
    down = pairs.other // w - pairs.one // w
    right = pairs.other % w - (w - 1 - pairs.one % w)
    error = torch.hypot(down * (size[0] / h), right * (size[1] / w))
    return torch.stack([(error == 0).float().mean(-1), error.mean(-1)], -1)


@torch.inference_mode()
@in_eval_mode
def correspondence(backbone: Backbone, index: Index, settings: Correspondence) -> Outcome:
    """Measure the accuracy of matches, from 0 to 1, and their error in pixels, as means over at most `limit` images.

    Every call uses the same images, and all ranks return the same numbers. Images that do not decode are left out.
    Raises UserError when no image decodes."""
    device = next(backbone.parameters()).device
    mine = np.array_split(subset(np.arange(len(index)), settings.limit), dist.size())[dist.rank()]
    parts = [np.empty((0, 2))]
    for samples, crops in batches(index, mine, settings.size, settings.resize, BATCH):
        # Without autocast, features are float32 on a GPU, too: neighbouring patches differ too little for bfloat16.
        features = backbone(torch.cat(views(crops.to(device), samples)))
        one, other = features.patches.chunk(2)
        parts.append(scores(one, other, features.grid, crops.shape[2:]).double().cpu().numpy())
    each = np.concatenate(dist.gather_objects(np.concatenate(parts)))  # (n, 2) accuracy and error of n images
    if not len(each):
        raise no_image_error(index)
    accuracy, error = each.mean(0).tolist()
    numbers = {"accuracy": accuracy, "error": error, "images": len(each)}
    return Outcome({f"correspondence/{name}": value for name, value in numbers.items()})


def views(crops: Tensor, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Normalise crops (B, 3, S, S), uint8, and return them and a mirrored, colour-jittered and grey copy of each.

    The jitter depends only on the index of the sample."""
    u = np.stack([sampling.uniforms(1, seed=0, epoch=0, sample=s) for s in samples])  # (B, 1, WIDTH)
    params = torch.from_numpy(sampling.photometrics(MIRRORED, u)[:, 0])
    return photometric.normalise(crops, crops.device), photometric.apply(crops, params)
