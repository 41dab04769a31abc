"""Run functions in float32 where autocast is on, and tell the dtype of matrix products."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def in_float32(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of tensors to run without autocast, with 16-bit positional arguments turned into float32."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        [device, *_] = (x.device.type for x in args if isinstance(x, Tensor))
        wide = (x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x for x in args)
        off = nullcontext() if device == "meta" else torch.autocast(device, enabled=False)  # no autocast on meta
        with off:
            return function(*wide, **kwargs)  # type: ignore[arg-type]

    return run


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's dtype if autocast is on, otherwise the dtype of x."""
    kind = x.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else x.dtype
