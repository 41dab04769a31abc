"""EsViT's loss of regions: tokens of one view matched with tokens of another (Li et al. 2022, arXiv:2106.09785).

The loss is equation 2 of the paper; its variants are those of section 4.3. B images, V views of N_v tokens, D channels
of the backbone, n rows of tokens, K prototypes, d channels of the bottleneck, Q views of the teacher."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.losses.prototypes import H, Match, Scores, match
from eagleray.models.heads import PrototypeHead

# Settings of the transport plan, which the paper does not give: SwAV's epsilon, and as many iterations as a plan of 49
# x 49 tokens needs until it changes little.
EPSILON, ITERATIONS = 0.05, 10

RegionLoss = Literal["softmax", "mse"]


class Regions(NamedTuple):
    """The tokens of V views: the features of a student's or a teacher's backbone, and the scores of its head."""

    features: list[Tensor]  # V x (B, N_v, D) features of the backbone, by which tokens are matched
    scores: Scores  # n rows, one for each token: view-major, then image, then token


def project_regions(features: list[Tensor], head: PrototypeHead) -> Regions:
    """Return the Regions of `features`, V x (B, N_v, D). The tokens of all views pass through the head together."""
    return Regions(features, Scores(head(torch.cat([x.flatten(0, 1) for x in features])), head.last.weight))


def sample_tokens(x: Tensor, tokens: int | None, generator: torch.Generator) -> Tensor:
    """Return `tokens` tokens of x (B, N, D), at the same positions in every image, drawn uniformly without replacement.

    All N tokens are returned when N is at most `tokens`, or when `tokens` is None."""
    if tokens is None or x.shape[1] <= tokens:
        return x
    return x[:, torch.randperm(x.shape[1], generator=generator, device=x.device)[:tokens]]


def region_loss(
    kind: RegionLoss, t: Regions, s: Regions, pairs: Match, center: Tensor, tau_t: float, tau_s: float
) -> Tensor:
    """Return the mean loss of matched tokens: cross-entropy `H` for the kind `softmax`, `squared_loss` for `mse`."""
    if kind == "mse":
        return squared_loss(t.scores, s.scores, pairs)
    return H(t.scores, s.scores, pairs, center, tau_t, tau_s)


def squared_loss(t: Scores, s: Scores, pairs: Match) -> Tensor:
    """Return BYOL's distance, the mean of |y_t - y_s|^2, for the scores y (K,) of matched tokens at unit length.

    The scores are never computed, as their products follow from z and W^T W (d, d)."""
    with torch.autocast(s.z.device.type, enabled=False):
        x, y = unit_scores(s.z, s.w), unit_scores(t.z, t.w).detach()
        return matched_distance(x @ (s.w.T @ t.w.detach()), y, pairs)


def matched_distance(x: Tensor, y: Tensor, pairs: Match) -> Tensor:
    """Return the weighted sum of 2 - 2 x_i . y_j over the pairs of student rows x (n, d) and teacher rows y (m, d).

    For rows of length one, each term is |x_i - y_j|^2."""
    loss = x.new_zeros(())
    for column in pairs.teacher.unbind(1):
        weight = pairs.weight * (column >= 0)
        loss = loss + (weight * (2 - 2 * (x * y[column.clamp(min=0)]).sum(1))).sum()
    return loss


def unit_scores(z: Tensor, w: Tensor) -> Tensor:
    """Return z (n, d) with each row scaled so that its scores, z times the transpose of w (K, d), have length one."""
    z = z.to(w.dtype)
    return z / ((z @ (w.T @ w)) * z).sum(1, keepdim=True).sqrt()


def match_transport(s: Sequence[Tensor], t: Sequence[Tensor]) -> Match:
    """Match each student token with the teacher token that receives most of its mass in an optimal transport plan.

    A plan moves the mass of one view's tokens to another view's tokens, all of equal mass (Cuturi 2013,
    arXiv:1306.0895). The arguments are those of `prototypes.match`."""
    teacher, weight = match(s, t)
    tokens = t[0].shape[1]
    to = torch.cat([torch.stack([transport_plan(x, y).argmax(-1) for y in t], -1).flatten(0, 1) for x in s])  # (n, Q)
    return Match(torch.where(teacher < 0, -1, teacher // tokens * tokens + to), weight)


@torch.no_grad()
def transport_plan(x: Tensor, y: Tensor) -> Tensor:
    """Return the transport plan (B, N, M) from tokens x (B, N, D) to tokens y (B, M, D), with rows that sum to one."""
    with torch.autocast(x.device.type, enabled=False):
        log_q = F.normalize(x.float(), dim=-1) @ F.normalize(y.float(), dim=-1).mT / EPSILON
    for _ in range(ITERATIONS):
        log_q = log_q - log_q.logsumexp(1, keepdim=True)  # the same mass for every token of y
        log_q = log_q - log_q.logsumexp(2, keepdim=True)  # the same mass for every token of x
    return log_q.exp()


MATCHINGS = {"argmax": match, "sinkhorn": match_transport}
