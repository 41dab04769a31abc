"""Networks without memory, built without the arithmetic of their first values."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FILLS = ("add_", "clamp_", "copy_", "erfinv_", "fill_", "mul_", "normal_", "sub_", "uniform_", "zero_")
SKIPPED = frozenset(getattr(torch.Tensor, name) for name in FILLS)


class Unfilled(TorchFunctionMode):
    """Skips what would only change values of tensors on the meta device, which have none."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in SKIPPED and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def blank() -> Iterator[None]:
    """Within it, tensors are made on the meta device: they have shapes but no values."""
    with torch.device("meta"), Unfilled():
        yield
