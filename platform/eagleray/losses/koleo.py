"""KoLeo spreads features apart: the Kozachenko-Leonenko estimator of their entropy (Sablayrolles et al. 2019,
arXiv:1806.03198), as DINOv2 uses it (Oquab et al. 2023, arXiv:2304.07193, section 4).

B images, D channels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import dist
from eagleray.base.autocast import in_float32

EPS = 1e-8  # the authors' eps of normalize and of pairwise_distance, and the summand inside the logarithm


@in_float32
def koleo_loss(x: Tensor, rows: tuple[int, ...], group: int | None = None) -> Tensor:
    """Return the mean of -log d over the rows of x (B, D), where d is a row's distance from the nearest other row.

    Rows are first scaled to length one. The nearest row is sought among the rows of all ranks or, with `group`, in the
    row's group of `group` consecutive rows; the last group includes the remainder. The authors search among the images
    of one GPU or of a few; here the result is the same for any number of ranks."""
    x = F.normalize(x, dim=1, eps=EPS)
    others = dist.gather_with_grad(x, rows)
    own = torch.arange(len(x), device=x.device).unsqueeze(1) + dist.offset(rows)
    cosines = (x.detach() @ others.detach().T).scatter(1, own, -math.inf)
    if group is not None:
        last = max(len(others) // group, 1) - 1
        groups = (torch.arange(len(others), device=x.device) // group).clamp(max=last)
        cosines = cosines.masked_fill(groups[own] != groups, -math.inf)
    nearest = cosines.argmax(1)
    distance = F.pairwise_distance(x, others[nearest], eps=EPS)
    return -(distance + EPS).log().mean()
