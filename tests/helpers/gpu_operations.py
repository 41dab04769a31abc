"""Operations that PyTorch has for a GPU alone, on tensors of the CPU: products of 16-bit matrices that are summed up in
float32, attention with a mask that has a gradient, and the parts of a batch norm over all ranks (R of them)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *given: Any, scale: Any = None) -> tuple[Tensor, ...]:
    scores = (q @ k.mT).float() * _scale(q, scale) + bias
    out, none = scores.softmax(-1).to(q.dtype) @ v, torch.zeros((), dtype=torch.long)
    return _by_token(out), scores.logsumexp(-1), none, none.clone()


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    out: Tensor,
    lse: Tensor,
    *given: Any,
    scale: Any = None,
) -> tuple[Tensor, ...]:
    weights = ((q @ k.mT).float() * _scale(q, scale) + bias - lse.unsqueeze(-1)).exp()
    of_scores = weights * ((grad @ v.mT).float() - (grad * out).float().sum(-1, keepdim=True))
    of_products = (of_scores * _scale(q, scale)).to(q.dtype)
    parts = of_products @ k, of_products.mT @ q, weights.to(q.dtype).mT @ grad
    return *map(_by_token, parts), of_scores.to(bias.dtype)


def _by_token(x: Tensor) -> Tensor:
    """Lay (B, heads, N, d) out as a GPU does: the heads of a token beside each other."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(_rows(x), 0, correction=0)
    return mean, (var + eps).rsqrt()


def _norm_gathered(
    x: Tensor, means: Tensor, scales: Tensor, mean_: Any, var_: Any, momentum: float, eps: float, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and scale (C,) over all ranks from theirs (R, C) and their numbers of rows (R,)."""
    share = (counts / counts.sum()).unsqueeze(1)
    mean = (share * means).sum(0)
    var = (share * (scales**-2 - eps + (means - mean).square())).sum(0)
    if mean_ is not None:
        mean_.lerp_(mean, momentum)
        var_.lerp_(var * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (var + eps).rsqrt()


def _normed(x: Tensor, weight: Any, bias: Any, mean: Tensor, scale: Tensor, eps: float) -> Tensor:
    out = (_rows(x) - mean) * scale
    return _as(x, out if weight is None else out * weight + bias)


def _norm_sums(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Any, *asked: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, centred = _rows(grad), _rows(x) - mean
    sums, products = rows.sum(0), (rows * centred).sum(0)
    return sums, products, products * scale, sums.clone()


def _norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Any, sums: Tensor, products: Tensor, counts: Tensor
) -> Tensor:
    n, centred = counts.sum(), _rows(x) - mean
    out = (_rows(grad) - sums / n - centred * scale.square() * products / n) * scale
    return _as(x, out if weight is None else out * weight)


def _rows(x: Tensor) -> Tensor:
    """Return x (B, C, ...) as rows (n, C) in float32."""
    return x.movedim(1, -1).reshape(-1, x.shape[1]).float()


def _as(x: Tensor, rows: Tensor) -> Tensor:
    return rows.to(x.dtype).view(x.movedim(1, -1).shape).movedim(-1, 1)


ON_GPU: dict[Any, Callable[..., Any]] = {
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten.addmm.dtype: lambda x, a, b, dtype, **given: torch.addmm(x, a.to(dtype), b.to(dtype), **given),
    aten.addmm.dtype_out: lambda x, a, b, dtype, **given: torch.addmm(x, a.to(dtype), b.to(dtype), **given),
    aten._scaled_dot_product_efficient_attention.default: _attend,
    aten._scaled_dot_product_efficient_attention_backward.default: _attend_backward,
    aten.batch_norm_stats.default: _norm_stats,
    aten.batch_norm_gather_stats_with_counts.default: _norm_gathered,
    aten.batch_norm_elemt.default: _normed,
    aten.batch_norm_backward_reduce.default: _norm_sums,
    aten.batch_norm_backward_elemt.default: _norm_backward,
}
