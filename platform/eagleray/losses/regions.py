"""Regions of one view matched with those of another, and how far apart they are: EsViT, Li et al. 2022,
arXiv:2106.09785, equation 2, and what section 4.3 compares it with."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.losses.prototypes import Match, cross_entropy, match, mean_scores
from eagleray.models.heads import PrototypeHead

# Of the transport plan: neither is published. Those of SwAV, with iterations until a plan of 49 x 49 changes little.
EPSILON, ITERATIONS = 0.05, 10

RegionLoss = Literal["softmax", "mse"]


class Side(NamedTuple):
    """What a student or a teacher makes of V views of N_v tokens: one token where a view is taken as a whole."""

    features: list[Tensor]  # V x (B, N_v, D) of the backbone, by which tokens are matched
    z: Tensor  # (n, d) unit bottleneck vectors, view-major, then image, then token
    w: Tensor  # (K, d) prototypes


def side(features: list[Tensor], head: PrototypeHead) -> Side:
    """The head on all views at once, (B, N_v, D) each."""
    return Side(features, head(torch.cat([x.flatten(0, 1) for x in features])), head.last.weight)


def sampled(x: Tensor, tokens: int | None) -> Tensor:
    """So many of the tokens (B, N, D), uniformly without replacement, the same of every image; all where there are no
    more."""
    if tokens is None or x.shape[1] <= tokens:
        return x
    return x[:, torch.randperm(x.shape[1], device=x.device)[:tokens]]


def region_loss(
    kind: RegionLoss, t: Side, s: Side, matched: Match, center: Tensor, tau_t: float, tau_s: float
) -> Tensor:
    """What is asked of student tokens and the teacher tokens that they are matched with."""
    if kind == "mse":
        return squared_loss(t, s, matched)
    return softmax_loss(t, s, matched, center, tau_t, tau_s)


def softmax_loss(t: Side, s: Side, matched: Match, center: Tensor, tau_t: float, tau_s: float) -> Tensor:
    """Mean of H(p_j*, p_i) over student tokens i, images and pairs of views."""
    return cross_entropy(t.z, s.z, t.w, s.w, center, matched, tau_t=tau_t, tau_s=tau_s)


def squared_loss(t: Side, s: Side, matched: Match) -> Tensor:
    """Mean of |y_j* - y_i|^2 of scores W z (K,) at unit length, which is BYOL's distance. No score is formed: their
    products are those of z, through W^T W (d, d)."""
    with torch.autocast(s.z.device.type, enabled=False):
        x, y = unit_scores(s.z, s.w), unit_scores(t.z, t.w).detach()
        x = x @ (s.w.T @ t.w.detach())
        loss = x.new_zeros(())
        for column in matched.teacher.unbind(1):
            weight = matched.weight * (column >= 0)
            loss = loss + (weight * (2 - 2 * (x * y[column.clamp(min=0)]).sum(1))).sum()
        return loss


def unit_scores(z: Tensor, w: Tensor) -> Tensor:
    """z (n, d) scaled so that W z is of length one."""
    z = z.to(w.dtype)
    return z / ((z @ (w.T @ w)) * z).sum(1, keepdim=True).sqrt()


def transported(s: Sequence[Tensor], t: Sequence[Tensor]) -> Match:
    """Each student token with the teacher token that gets most of its mass in the optimal transport between the two
    views of the image (Cuturi 2013, arXiv:1306.0895), in which every token gives or gets the same."""
    teacher, weight = match(s, t)
    tokens = t[0].shape[1]
    to = torch.cat([torch.stack([plan(x, y).argmax(-1) for y in t], -1).flatten(0, 1) for x in s])  # (n, Q)
    return Match(torch.where(teacher < 0, -1, teacher // tokens * tokens + to), weight)


@torch.no_grad()
def plan(x: Tensor, y: Tensor) -> Tensor:
    """The transport plan between the tokens of x (B, N, D) and of y (B, M, D): (B, N, M), rows summing to one."""
    with torch.autocast(x.device.type, enabled=False):
        log_q = F.normalize(x.float(), dim=-1) @ F.normalize(y.float(), dim=-1).mT / EPSILON
    for _ in range(ITERATIONS):
        log_q = log_q - log_q.logsumexp(1, keepdim=True)  # as much for every token of y
        log_q = log_q - log_q.logsumexp(2, keepdim=True)  # as much for every token of x
    return log_q.exp()


MATCHINGS = {"argmax": match, "sinkhorn": transported}


def follow(center: Tensor, t: Side, rows: Sequence[int], momentum: float) -> None:
    """The centre (K,) moves, in place, towards the mean of the teacher's scores over the images of all ranks."""
    n = len(t.features) * t.features[0].shape[1] * sum(rows)
    center.lerp_(mean_scores(t.z, t.w, n), 1 - momentum)
