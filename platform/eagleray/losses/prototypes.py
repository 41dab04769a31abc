"""Cross-entropy between softmaxes over prototypes, for DINO (Caron et al. 2021, arXiv:2104.14294, equation 3), EsViT's
regions (Li et al. 2022, arXiv:2106.09785, equation 2), SelfPatch and SwAV, exact, without a score for each row at once.

Rows are unit bottleneck vectors z (n, d), scores z W^T with W (K, d) the prototypes, K far larger than d. A student row
is compared with one teacher row or several, each at its own rate. Written out for student row i with weight r_i and the
teacher rows j that it is matched with, a_i of them,

    sum_i r_i sum_j H(p_j, softmax(W z_i / tau)) = sum_i r_i a_i lse(W z_i / tau) - sum_j (W^T p_j) . y_j,
    y_j = sum of r_i z_i / tau over the student rows i matched with j,

so teacher and student rows never meet in K dimensions: a few of either are taken at a time, their softmax serves the
loss and both gradients, and is dropped.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import dist
from eagleray.losses.entropy import entropy, usage

# Scores that are there at once, 64 MiB and 256 MiB of them; fewer make the sums over chunks dear.
CHUNK = {"cpu": 2**24, "cuda": 2**26}
IN_CACHE = 2**19  # scores
SEEN = 64  # teacher rows whose probabilities are looked at, not only learnt from


class Match(NamedTuple):
    """Whom n student rows are compared with, and how much each counts."""

    teacher: Tensor  # (n, Q) rows of the teacher, -1 for none
    weight: Tensor  # (n,)


def match(s: Sequence[Tensor], t: Sequence[Tensor]) -> Match:
    """Every token of a student view with the likest of the same image in each other teacher view, by cosine. Views are
    s[v] (B, N_v, D) and t[q] (B, M, D), one token each to compare images as a whole; the first views are the same for
    both. Rows are view-major, then image, then token. Weights make a mean: over tokens, images and pairs of views."""
    (images, tokens, _), device = t[0].shape, t[0].device
    unit = [_unit(x) for x in t]
    first = torch.arange(images, device=device).unsqueeze(1) * tokens  # (B, 1) where an image's rows begin
    teacher, weight = [], []
    for v, x in enumerate(s):
        with torch.autocast(device.type, enabled=False):  # neighbours differ by less than half precision does
            likest = [(_unit(x) @ y.mT).argmax(-1) for y in unit]  # Q x (B, N_v)
        found = [rows + first + q * images * tokens for q, rows in enumerate(likest)]
        teacher.append(torch.stack([rows if v != q else torch.full_like(rows, -1) for q, rows in enumerate(found)], -1))
        weight.append(torch.full(x.shape[:2], 1 / (x.shape[0] * x.shape[1]), device=device))
    pairs = len(t) * (len(s) - 1)
    return Match(torch.cat([x.flatten(0, 1) for x in teacher]), torch.cat([x.flatten() for x in weight]) / pairs)


def probabilities(z: Tensor, w: Tensor, center: Tensor, tau: float) -> Tensor:
    """The teacher's p = softmax((z W^T - c) / tau), (n, K): for a few rows. SwAV's assignments are such too, tau its
    epsilon: what Sinkhorn's iterations multiply a prototype's column by is exp(-c / tau)."""
    dtype = _dtype(z)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        return _targets(z.detach(), w.detach().to(dtype), center, tau)


def choices(z: Tensor, w: Tensor, center: Tensor, tau: float) -> dict[str, Tensor]:
    """`entropy` and `usage` of what the teacher's first rows z (n, d) choose: a few, as scores are K wide."""
    p = probabilities(z[:SEEN], w, center, tau)
    return {"entropy": entropy(p), "usage": usage(p)}


def mean_scores(z: Tensor, w: Tensor, n: int) -> Tensor:
    """What a centre follows: the mean of z W^T over the n rows of all ranks, (K,), formed from the mean of z."""
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        return w.to(_wide(z)) @ (dist.total(z.to(_wide(z)).sum(0)) / n)


def cross_entropy(
    t: Tensor,
    s: Tensor,
    w_t: Tensor,
    w_s: Tensor,
    center: Tensor,
    matched: Match,
    *,
    tau_t: float,
    tau_s: float,
    chunk: int | None = None,
) -> Tensor:
    """Weighted sum over student rows s (n, d) of H(p, softmax(s W_s^T / tau_s)), for the p of each teacher row t (m, d)
    that they are matched with; prototypes W (K, d), centre (K,). The gradients, of s and W_s alone, are formed with the
    loss. Products are in autocast's dtype, the rest in float32; `chunk` scores are there at once."""
    chunk = chunk or CHUNK["cuda" if s.is_cuda else "cpu"]
    rows = max(1, chunk // len(w_s))
    dtype = _dtype(s)
    with torch.autocast(s.device.type, enabled=False):
        args = (s, w_s, t.detach(), w_t.detach(), center, *matched, tau_t, tau_s, rows, dtype)
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
        want_w = ctx.needs_input_grad[1]
        z, w = s.to(_wide(s)) / tau_s, w_s.to(dtype)  # (n, d), (K, d)
        grad_w = torch.zeros_like(w_s, dtype=z.dtype) if want_w else None

        # Whoever has no teacher row is matched with one more, which is dropped.
        teacher = teacher.where(teacher >= 0, len(t))  # (n, Q)
        a = weight * (teacher < len(t)).sum(1)  # (n,) r_i a_i
        y = z.new_zeros(len(t) + 1, z.shape[1])
        for column in teacher.unbind(1):
            _add_rows(y, column, weight.unsqueeze(1) * z)
        means, w_t = torch.zeros_like(y), w_t.to(dtype)  # W^T p_j
        for part in _parts(len(t), rows):
            p = _targets(t[part], w_t, center, tau_t).to(dtype)  # (R, K)
            means[part] = _product(p, w)
            if grad_w is not None:
                _add_product(grad_w, p.T, y[part].to(dtype), alpha=-1)
            del p
        del w_t

        lse, grad_z = z.new_empty(len(z)), torch.empty_like(z)
        for part in _parts(len(z), rows):
            x = _product(z[part].to(dtype), w.T)  # (R, K)
            lse[part] = _softmax_(x)
            p = x.to(dtype)
            grad_z[part] = _product(p, w) * a[part].unsqueeze(1)
            if grad_w is not None:
                _add_product(grad_w, p.T, (a[part].unsqueeze(1) * z[part]).to(dtype))
            del x, p
        for column in teacher.unbind(1):
            grad_z -= weight.unsqueeze(1) * means[column]

        ctx.save_for_backward((grad_z / tau_s).to(s.dtype), None if grad_w is None else grad_w.to(w_s.dtype))
        # Row by row first: a sum over all K times n numbers at once loses two digits.
        return (a * lse).sum() - (means * y).sum(1).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *(None if g is None else g * grads[0] for g in ctx.saved_tensors), *[None] * 9


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x.detach().to(_wide(x)), dim=-1)


def _add_rows(out: Tensor, at: Tensor, x: Tensor) -> None:
    """out[at[i]] += x[i], in the same order every time: on a GPU index_add_ is not, on a CPU index_put_."""
    if out.is_cuda:
        out.index_put_((at,), x, accumulate=True)
    else:
        out.index_add_(0, at, x)


def _parts(n: int, rows: int) -> list[slice]:
    return [slice(i, min(i + rows, n)) for i in range(0, n, rows)]


def _targets(t: Tensor, w: Tensor, center: Tensor, tau: float) -> Tensor:
    x = _product((t.to(_wide(t)) / tau).to(w.dtype), w.T).sub_(center / tau)
    _softmax_(x)
    return x


def _softmax_(x: Tensor) -> Tensor:
    """Makes scores (R, K) their softmax and gives the logarithm of what it divided by, (R,)."""
    # On a CPU a few rows at a time: what one pass read is still in the cache in the next.
    rows = len(x) if x.is_cuda else max(1, IN_CACHE // x.shape[1])
    out = []
    for part in x.split(rows):
        top = part.amax(1, keepdim=True)
        total = part.sub_(top).exp_().sum(1, keepdim=True)
        part.div_(total)
        out.append((top + total.log()).squeeze(1))
    return torch.cat(out)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b, summed and kept in float32 at least; a CPU rounds halves at the end."""
    if a.is_cuda and a.dtype != _wide(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(_wide(a))


def _add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1) -> None:
    """out += alpha a b, in place."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, alpha=alpha)
    else:
        out.add_(_product(a, b), alpha=alpha)


def _dtype(x: Tensor) -> torch.dtype:
    """What products are formed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
