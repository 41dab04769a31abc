"""Cross-entropy between softmaxes over prototypes, exact, without all scores in memory at once.

It is the loss of DINO (Caron et al. 2021, arXiv:2104.14294, equation 3), of EsViT's regions (Li et al. 2022,
arXiv:2106.09785, equation 2), of SelfPatch and of SwAV. n rows, K prototypes, d channels of the bottleneck.

Rows are unit bottleneck vectors z (n, d), scores are z W^T with the prototypes W (K, d), and K is far larger than d. A
student row is matched with at most Q teacher rows, and has one weight. For student row i with weight r_i and a_i
matched teacher rows j, which have probabilities p_j (H is the cross-entropy, lse the logsumexp),

    sum_i r_i sum_j H(p_j, softmax(W z_i / tau)) = sum_i r_i a_i lse(W z_i / tau) - sum_j (W^T p_j) . y_j,
    y_j = sum of r_i z_i / tau over the student rows i matched with j,

so the scores of teacher and student rows are never needed together. A few rows of either are processed at a time: their
softmax serves the loss and both gradients, and is then dropped."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import devices, dist
from eagleray.base.autocast import product_dtype
from eagleray.base.errors import UserError
from eagleray.losses.entropy import entropy, usage
from eagleray.losses.products import add_product, product, sum_dtype
from eagleray.losses.softmax import softmax

# Most scores in memory at once: 64 MiB in float32 on a CPU, 256 MiB on accelerators. Smaller chunks are slower.
CPU_CHUNK, CHUNK = 2**24, 2**26
CACHE_SCORES = 2**19  # scores whose softmax a CPU computes at a time: 2 MiB in float32, which fit its cache
STATS_ROWS = 64  # number of teacher rows whose probabilities `assignment_stats` computes


class Scores(NamedTuple):
    """The scores z W^T of n rows, kept as two factors, because all n x K scores would not fit in memory."""

    z: Tensor  # (n, d) unit bottleneck vectors, view-major, then image, then token
    w: Tensor  # (K, d) prototypes


class Match(NamedTuple):
    """The teacher rows with which each of n student rows is compared, and the weight of each student row."""

    teacher: Tensor  # (n, Q) indices of teacher rows, -1 for none
    weight: Tensor  # (n,) weight of each student row in the loss


def match_views(t: Scores, s: Scores, images: int) -> Match:
    """Match each row of the student, an image of a view, with the same image in every other view of the teacher.

    Rows are view-major, with `images` rows per view. The teacher's views are the first of the student's views. The
    weights make the loss a mean over images and pairs of views."""
    views, device = (len(s.z) // images, len(t.z) // images), s.z.device
    v, q = (torch.arange(n, device=device) for n in views)
    rows = images * q + torch.arange(images, device=device).unsqueeze(1)  # (B, Q)
    same = (v.unsqueeze(1) == q).unsqueeze(1)  # (V, 1, Q)
    weight = torch.full((len(s.z),), 1 / images, device=device) / (views[1] * (views[0] - 1))
    return Match(torch.where(same, -1, rows).flatten(0, 1), weight)


def match(s: Sequence[Tensor], t: Sequence[Tensor]) -> Match:
    """Match every student token with the most similar token of the same image in each teacher view but its own.

    Similarity is the cosine. Student views are s[v] (B, N_v, D); teacher views t[q] (B, M, D) are of the same crops as
    the first student views. Rows are ordered by view, then image, then token. The weights make the loss a mean over
    tokens, images and pairs of views."""
    (images, tokens, _), device = t[0].shape, t[0].device
    unit = [_unit(x) for x in t]
    first = torch.arange(images, device=device).unsqueeze(1) * tokens  # (B, 1) first row of each image within a view
    teacher, weight = [], []
    for v, x in enumerate(s):
        with torch.autocast(device.type, enabled=False):  # neighbours' similarities may be equal in 16 bits
            nearest = [(_unit(x) @ y.mT).argmax(-1) for y in unit]  # Q x (B, N_v)
        rows = [token + first + q * images * tokens for q, token in enumerate(nearest)]
        teacher.append(torch.stack([r if v != q else torch.full_like(r, -1) for q, r in enumerate(rows)], -1))
        weight.append(torch.full(x.shape[:2], 1 / (x.shape[0] * x.shape[1]), device=device))
    pairs = len(t) * (len(s) - 1)
    return Match(torch.cat([x.flatten(0, 1) for x in teacher]), torch.cat([x.flatten() for x in weight]) / pairs)


def check_large_crops(views: Sequence[Tensor]) -> None:
    """Raises UserError unless the first two views (B, 3, S, S), which a teacher sees, are of one size for `match`."""
    sizes = [x.shape[3] for x in views[:2]]
    if sizes[0] != sizes[1]:
        raise UserError(f"views: the first two, the large crops, are of {sizes} pixels; expected one size")


def probabilities(z: Tensor, w: Tensor, center: Tensor, tau: float) -> Tensor:
    """Return the teacher's p = softmax((z w^T - center) / tau), (n, K), for a few rows z (n, d).

    SwAV's assignments have this form too. There tau is Sinkhorn's epsilon, and exp(-center / tau) is the factor by
    which its iterations scale the column of each prototype."""
    dtype = product_dtype(z)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        x = product((z.detach().to(sum_dtype(z)) / tau).to(dtype), w.detach().to(dtype).T)
        return x.sub_(center / tau).softmax(1)


def assignment_stats(t: Scores, center: Tensor, tau: float) -> dict[str, Tensor]:
    """Return two statistics of the teacher's probabilities over its first STATS_ROWS rows, both divided by ln K.

    `entropy` is the mean entropy of a row, `usage` the entropy of the rows' mean."""
    p = probabilities(t.z[:STATS_ROWS], t.w, center, tau)
    return {"entropy": entropy(p), "usage": usage(p)}


def mean_scores(z: Tensor, w: Tensor, n: int | Tensor) -> Tensor:
    """Return the mean (K,) of the scores z W^T over the n rows of all ranks, computed from the mean of z."""
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        return w.to(sum_dtype(z)) @ (dist.total(z.to(sum_dtype(z)).sum(0)) / n)


def update_center(center: Tensor, t: Scores, rows: Sequence[int], momentum: float) -> None:
    """Move the centre (K,), in place, towards the mean of the teacher's scores over the images of all ranks.

    `rows` has the number of images of each rank. Every image has the same number of rows in `t`."""
    n = len(t.z) // rows[dist.rank()] * sum(rows)
    center.lerp_(mean_scores(t.z, t.w, n), 1 - momentum)


def score_chunks(t: Scores, tau: float) -> Iterator[Tensor]:
    """Yield the scores z W^T / tau, a few rows (R, K) at a time, without a gradient."""
    w = t.w.detach().to(product_dtype(t.z))
    for part in _parts(len(t.z), chunk_rows(w)):
        with torch.autocast(w.device.type, enabled=False):
            x = product((t.z[part].detach().to(sum_dtype(t.z)) / tau).to(w.dtype), w.T)
        yield x


def chunk_rows(w: Tensor) -> int:
    """Return how many rows of scores over prototypes w (K, d) may be in memory at once."""
    return max(1, (CHUNK if devices.is_accelerator(w.device) else CPU_CHUNK) // len(w))


def H(t: Scores, s: Scores, pairs: Match, center: Tensor, tau_t: float, tau_s: float) -> Tensor:
    """Return the mean of H(p_t, p_s) = -p_t log p_s over the pairs of teacher and student rows.

    p_t = softmax((t - center) / tau_t) has no gradient, p_s = softmax(s / tau_s)."""
    return cross_entropy(t.z, s.z, t.w, s.w, center, pairs, tau_t=tau_t, tau_s=tau_s)


def cross_entropy(
    t: Tensor,
    s: Tensor,
    w_t: Tensor,
    w_s: Tensor,
    center: Tensor,
    pairs: Match,
    *,
    tau_t: float,
    tau_s: float,
    chunk: int | None = None,
) -> Tensor:
    """Return the weighted sum of H(p, softmax(s w_s^T / tau_s)) over student rows s (n, d) and their teacher rows.

    p are the probabilities of the teacher rows t (m, d). Prototypes w_t and w_s are (K, d), `center` is (K,). Only s
    and w_s have gradients, which are computed together with the loss. Products are in autocast's dtype, sums in
    float32. `chunk` is the largest number of scores in memory at once."""
    dtype = product_dtype(s)
    # On an accelerator, probabilities have the dtype of products: in 16 bits, twice as many rows take the same memory.
    times = sum_dtype(s).itemsize // dtype.itemsize if devices.is_accelerator(s.device) else 1
    rows = times * chunk_rows(w_s) if chunk is None else max(1, chunk // len(w_s))
    with torch.autocast(s.device.type, enabled=False):
        args = (s, w_s, t.detach(), w_t.detach(), center, *pairs, tau_t, tau_s, rows, dtype)
        return _CrossEntropy.apply(*args)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        s: Tensor,
        w_s: Tensor,
        t: Tensor,
        w_t: Tensor,
        center: Tensor,
        teacher: Tensor,
        weight: Tensor,
        tau_t: float,
        tau_s: float,
        rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        needs_grad_w = ctx.needs_input_grad[1]
        z, w = s.to(sum_dtype(s)) / tau_s, w_s.to(dtype)  # (n, d), (K, d)
        grad_w = torch.zeros_like(w_s, dtype=z.dtype) if needs_grad_w else None

        # Missing teacher rows (-1) become an extra row len(t), whose mean below stays zero, so that they add nothing.
        teacher = teacher.where(teacher >= 0, len(t))  # (n, Q)
        a = weight * (teacher < len(t)).sum(1)  # (n,) r_i a_i
        y = z.new_zeros(len(t) + 1, z.shape[1])
        for column in teacher.unbind(1):
            _add_rows(y, column, weight.unsqueeze(1) * z)
        means, w_t = torch.zeros_like(y), w_t.to(dtype)  # `means` has W^T p_j for each teacher row j
        z_t, c = (t.to(sum_dtype(t)) / tau_t).to(dtype), center / tau_t
        for part in _parts(len(t), rows):
            p, _ = _softmax(z_t[part], w_t, c)  # (R, K)
            means[part] = product(p, w)
            if grad_w is not None:
                add_product(grad_w, p.T, y[part].to(dtype), alpha=-1)
            del p
        del w_t, z_t

        lse, grad_z = z.new_empty(len(z)), torch.empty_like(z)
        for part in _parts(len(z), rows):
            p, lse[part] = _softmax(z[part].to(dtype), w)  # (R, K)
            grad_z[part] = product(p, w) * a[part].unsqueeze(1)
            if grad_w is not None:
                add_product(grad_w, p.T, (a[part].unsqueeze(1) * z[part]).to(dtype))
            del p
        for column in teacher.unbind(1):
            grad_z -= weight.unsqueeze(1) * means[column]

        # The gradients are kept in float32: in float16 they would underflow before `backward` applies the loss scale.
        ctx.save_for_backward(grad_z / tau_s, grad_w)
        ctx.dtypes = s.dtype, w_s.dtype
        # Each row is summed first, because one sum over all numbers would lose two digits.
        return (a * lse).sum() - (means * y).sum(1).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if g is None else (g * grads[0]).to(dtype) for g, dtype in saved), *[None] * 9


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.detach().to(sum_dtype(x)), dim=-1)


def _add_rows(out: Tensor, at: Tensor, x: Tensor) -> None:
    """Add x[i] to out[at[i]], in the same order every time.

    index_add_ has no fixed order on an accelerator, index_put_ has none on a CPU."""
    if devices.is_accelerator(out.device):
        out.index_put_((at,), x, accumulate=True)
    else:
        out.index_add_(0, at, x)


def _parts(n: int, rows: int) -> list[slice]:
    return [slice(i, min(i + rows, n)) for i in range(0, n, rows)]


def _softmax(z: Tensor, w: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return softmax(z W^T - c) (R, K) in W's dtype for a few rows z (R, d), and its logsumexp (R,); c is (K,)."""
    if devices.is_accelerator(w.device):
        return softmax(z, w, c)
    x = product(z, w.T)
    lse = _softmax_(x if c is None else x.sub_(c))
    return x.to(w.dtype), lse


def _softmax_(x: Tensor) -> Tensor:
    """Replace scores (R, K) by their softmax, in place, and return their logsumexp (R,)."""
    out = []
    for part in x.split(max(1, CACHE_SCORES // x.shape[1])):  # few rows, so that each pass finds them in the cache
        top = part.amax(1, keepdim=True)
        total = part.sub_(top).exp_().sum(1, keepdim=True)
        part.div_(total)
        out.append((top + total.log()).squeeze(1))
    return torch.cat(out)
