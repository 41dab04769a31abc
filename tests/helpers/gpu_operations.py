"""Operations that PyTorch has for a GPU alone, on tensors of the CPU: products of 16-bit matrices that are summed up in
float32, and attention with a mask that has a gradient."""

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


ON_GPU: dict[Any, Callable[..., Any]] = {
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten.addmm.dtype: lambda x, a, b, dtype, **given: torch.addmm(x, a.to(dtype), b.to(dtype), **given),
    aten.addmm.dtype_out: lambda x, a, b, dtype, **given: torch.addmm(x, a.to(dtype), b.to(dtype), **given),
    aten._scaled_dot_product_efficient_attention.default: _attend,
    aten._scaled_dot_product_efficient_attention_backward.default: _attend_backward,
}
