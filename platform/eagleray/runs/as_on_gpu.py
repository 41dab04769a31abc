"""Let a step that is traced on tensors without values take the branches that a GPU takes, on any machine.

Such tensors lie on the CPU, as PyTorch makes none for a GPU that is not there. What a GPU does otherwise is what code
decides by the device (`base.devices`), autocast, which keeps more in float32, and batch norm over all ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as td
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import devices, dist

# What autocast computes in float32 on a GPU, of the operations that training may have: PyTorch's autocast_mode.h.
FLOAT32 = """
exp expm1 log log1p log2 log10 reciprocal rsqrt pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
layer_norm native_layer_norm rms_norm group_norm cosine_similarity nll_loss nll_loss2d kl_div l1_loss smooth_l1_loss
huber_loss mse_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest2d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa prod prod.dim_int softmax.int
log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
"""
UNCAST = ("cat", "stack")  # a CPU casts what these join beforehand, and a GPU while it writes
ALIGNED = 16  # a mask has a multiple of so many columns
HALF = (torch.bfloat16, torch.float16)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """A context in which tensors of the CPU are computed with as on a GPU, as far as their shapes and dtypes go."""
    with devices.pretending(), torch.library._scoped_library("aten", "IMPL") as library:
        for name in FLOAT32.split():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                library.impl(name, autocast_kernel(name, "AutocastCPU", widened), "AutocastCPU")
        for name in UNCAST:
            kernel = autocast_kernel(name, "AutocastCPU", lambda x: x)
            library.impl(name, kernel, "AutocastCPU", allow_override=True)
        library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        yield


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return scaled_dot_product_attention as a GPU computes it: in one operation, before which a mask (..., N, M) is
    aligned."""
    if mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale)[0]  # type: ignore[no-any-return]
    aligned = F.pad(mask, (0, -mask.shape[-1] % ALIGNED))[..., : mask.shape[-1]]
    whole = aligned.expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, whole, True, p, causal, scale=scale)[0]  # type: ignore[no-any-return]


def autocast_kernel(name: str, key: str, cast: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return what an operation does where autocast's dispatch `key` is on: each argument is cast, which may be a list
    or a number too."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    beyond = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(beyond):
            return operation(*map(cast, args), **{name: cast(x) for name, x in kwargs.items()})

    return kernel


def widened(x: Any) -> Any:
    """Return a 16-bit tensor in float32, and everything else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype in HALF else x


def exchange_moments(module: nn.Module) -> None:
    """Let the batch norms of a module, in place, exchange what those over all ranks do on a GPU. PyTorch's own layer
    for it takes no tensors of a CPU."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.__class__ = type("Exchanging", (_Exchanging, type(part)), {})


class _Exchanging(nn.SyncBatchNorm):
    """The exchanges of PyTorch's layer, and then the computation of the layer that it stands for. `models.batch_norm`
    takes it for one over all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, ...)."""
        return super(nn.SyncBatchNorm, self).forward(_Exchange.apply(x) if self.training else x)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """The exchanges of torch.nn.SyncBatchNorm for x (B, C, ...): mean, deviation and number of rows in the forward
    pass, two sums in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.channels = x.shape[1]
        own = torch.empty(2 * ctx.channels + 1, device=x.device)
        td.all_gather_into_tensor(own.new_empty(dist.size() * len(own)), own)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        td.all_reduce(torch.empty(2 * ctx.channels, device=grads[0].device))
        return grads[0]
