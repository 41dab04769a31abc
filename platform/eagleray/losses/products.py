"""Similarities of vectors in float32, for softmaxes with a low temperature.

Autocast rounds a product of matrices to 16 bits. Near 1 bfloat16 has steps of 1/256, and half a step of error in a
cosine s changes exp(s / 0.05) by 4 %. The vectors may be rounded, since their errors average out; the sums of their
products may not. For float32 and float64 every function here equals the PyTorch operation that its docstring names."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagleray.base import devices
from eagleray.base.autocast import product_dtype


def unit(x: Tensor) -> Tensor:
    """Scale vectors (..., C) to length one: F.normalize."""
    return F.normalize(widen(x), dim=-1)


def cosine(p: Tensor, z: Tensor) -> Tensor:
    """Return the cosine (B,) of the angle between the rows of p and z (B, C): F.cosine_similarity."""
    return F.cosine_similarity(widen(p), widen(z), dim=1)


def distance(p: Tensor, z: Tensor) -> Tensor:
    """Return BYOL's equation 2: the mean squared distance of predictions and targets (B, C), scaled to length one."""
    return 2 - 2 * cosine(p, z.detach()).mean()


def inner(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products (n, m) of the rows of x (n, C) with the rows of y (m, C): x @ y.T."""
    dtype = product_dtype(x)
    if dtype == sum_dtype(x):
        return x @ y.T
    with torch.autocast(x.device.type, enabled=False):
        return _Inner.apply(x, y, dtype)  # type: ignore[no-any-return]


class _Inner(torch.autograd.Function):
    """The product x @ y.T, with factors rounded to `dtype` and sums in float32, also in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = x.dtype, y.dtype
        x, y = x.to(dtype), y.to(dtype)
        ctx.save_for_backward(x, y)
        return product(x, y.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        g = grads[0].to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            of_x = product(g, y).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
            of_y = product(g.T, x).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return of_x, of_y, None


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a b of matrices of one dtype, accumulated and returned in float32 at least."""
    if _sums_in_float32(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    # `@` on 16-bit matrices rounds sums to 16 bits, on a CPU also partial sums. Float32 holds the products exactly.
    return widen(a) @ widen(b)


def add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1) -> None:
    """Add alpha times the product of matrices a and b of one dtype to `out`, which is in float32 at least, in place."""
    if _sums_in_float32(a):
        torch.addmm(out, a, b, out_dtype=torch.float32, alpha=alpha, out=out)
    else:
        out.addmm_(widen(a), widen(b), alpha=alpha)


def _sums_in_float32(a: Tensor) -> bool:
    """Return whether `a` is a 16-bit matrix whose products PyTorch can return in float32 on its device."""
    return devices.has_wide_sums(a.device) and a.dtype != sum_dtype(a)


def widen(x: Tensor) -> Tensor:
    """Return a 16-bit tensor converted to float32, and any other tensor unchanged."""
    return x.to(sum_dtype(x))


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which to sum the values of x: float32 for 16-bit values, otherwise their own."""
    return torch.promote_types(x.dtype, torch.float32)
