"""Whether a backbone finds patches again in the mirrored and recoloured image, without labels: the correspondence
benchmark of EsViT, Li et al. 2021, arXiv:2106.09785, section 2.1 and appendix C.7."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor

from eagleray.base import dist
from eagleray.config.view import View
from eagleray.data.index import Index
from eagleray.models.backbone import Backbone
from eagleray.protocols.eval_mode import evaluating
from eagleray.protocols.features import batches, some, undecoded
from eagleray.views import photometric, sampling

PAIRS = 10  # of an image, the most alike, that count
IMAGES = 50_000  # as many as the paper's: ImageNet's validation images
BATCH = 128  # images, two views of each
# The paper says RandomGrayscale; the authors' code, whose numbers the paper gives, leaves no second view its colours.
MIRRORED = sampling.Views.of([View(flip=1.0, jitter=0.8, gray=1.0)])


class Matches(NamedTuple):
    """The k pairs of patches of two images that are most alike, likest first."""

    one: Tensor  # (..., k) patches of one image
    other: Tensor  # (..., k) the patch of the other that is most like each
    cosine: Tensor  # (..., k)


def matches(one: Tensor, other: Tensor, k: int = PAIRS) -> Matches:
    """Every patch of one (..., N, D) finds its likest of the other (..., M, D); the k likest of these N pairs, or all
    where N is less. Ties are won by the patches that come first, so the same vectors make the same pairs."""
    likest = (F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).mT).max(-1)
    cosine, place = (x[..., :k] for x in likest.values.sort(dim=-1, descending=True, stable=True))
    return Matches(place, likest.indices.gather(-1, place), cosine)


def scores(one: Tensor, other: Tensor, grid: tuple[int, int], size: Sequence[int], k: int = PAIRS) -> Tensor:
    """Accuracy and error (..., 2) for patches (..., N, D) of an image and of its mirror image, of size (H, W) both. The
    truth is the mirrored place; the error is how far away the found one is, centre to centre, in pixels."""
    h, w = grid
    found = matches(one, other, k)
    down = found.other // w - found.one // w
    right = found.other % w - (w - 1 - found.one % w)
    error = torch.hypot(down * (size[0] / h), right * (size[1] / w))
    return torch.stack([(error == 0).float().mean(-1), error.mean(-1)], -1)


@torch.inference_mode()
@evaluating
def correspondence(
    backbone: Backbone, index: Index, *, size: PositiveInt, resize: PositiveInt, limit: PositiveInt = IMAGES
) -> dict[str, float]:
    """Means over at most `limit` images, those that do not decode left out: accuracy as a share, error in pixels; the
    same on every rank and each time. Raises UserError when no image decodes."""
    device = next(backbone.parameters()).device
    mine = np.array_split(some(np.arange(len(index)), limit), dist.size())[dist.rank()]
    found = [np.empty((0, 2))]
    for samples, crops in batches(index, mine, size, resize, BATCH):
        # In float32 also on a GPU: neighbouring patches differ by little.
        features = backbone(torch.cat(views(crops.to(device), samples)))
        one, other = features.patches.chunk(2)
        found.append(scores(one, other, features.grid, crops.shape[2:]).double().cpu().numpy())
    each = np.concatenate(dist.objects(np.concatenate(found)))  # (n, 2)
    if not len(each):
        raise undecoded(index)
    accuracy, error = each.mean(0).tolist()
    return {"correspondence/accuracy": accuracy, "correspondence/error": error, "correspondence/images": len(each)}


def views(crops: Tensor, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
    """uint8 crops (B, 3, S, S) as they are and mirrored, jittered and grey, normalised both. A sample's number alone
    says how it is jittered."""
    u = np.stack([sampling.uniforms(1, seed=0, epoch=0, sample=s) for s in samples])  # (B, 1, WIDTH)
    params = torch.from_numpy(sampling.photometrics(MIRRORED, u)[:, 0])
    return photometric.normalised(crops, crops.device), photometric.apply(crops, params)
