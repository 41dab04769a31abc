"""Trace a training step on fake tensors as it runs on a GPU, also on a machine without one.

The fake tensors are on the CPU, as PyTorch makes none for an absent GPU. So three things of a GPU are imitated: the
answers of `base.devices`, autocast (which computes more operations in float32), and batch norm over all ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as td
import torch.nn.functional as F
from torch import Tensor, nn

from eagleray.base import devices, dist

# Operations of training that autocast computes in float32 on a GPU, from PyTorch's autocast_mode.h.
FLOAT32 = """
exp expm1 log log1p log2 log10 reciprocal rsqrt pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
layer_norm native_layer_norm rms_norm group_norm cosine_similarity nll_loss nll_loss2d kl_div l1_loss smooth_l1_loss
huber_loss mse_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest2d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa prod prod.dim_int softmax.int
log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim
"""
UNCAST = ("cat", "stack")  # operations whose inputs autocast casts on a CPU; on a GPU the operations cast while writing
ALIGNED = 16  # the rows of an attention mask are padded in memory to a multiple of this many columns
HALF = (torch.bfloat16, torch.float16)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """A context in which operations on CPU tensors give tensors of the shapes and dtypes that a GPU would give."""
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
    """Return scaled_dot_product_attention, computed by one fused operation as on a GPU.
    The rows of `mask` (..., N queries, M keys) are first padded in memory to a multiple of ALIGNED columns."""
    if mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale)[0]  # type: ignore[no-any-return]
    aligned = F.pad(mask, (0, -mask.shape[-1] % ALIGNED))[..., : mask.shape[-1]]
    whole = aligned.expand(*q.shape[:3], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, whole, True, p, causal, scale=scale)[0]  # type: ignore[no-any-return]


def autocast_kernel(name: str, key: str, cast: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the kernel by which autocast, whose dispatch key is `key`, runs the operation `name`. It applies `cast` to
    each argument, of any type, and excludes the key, so that the operation does not call this kernel again."""
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
    """Replace the batch norms of a module, in place, by layers that send as much between ranks as PyTorch's
    SyncBatchNorm, which does not accept CPU tensors."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.__class__ = type("Exchanging", (_Exchanging, type(part)), {})


class _Exchanging(nn.SyncBatchNorm):
    """A batch norm with the communication of SyncBatchNorm and the computation of the layer that it replaces.
    It is a subclass of SyncBatchNorm, so `models.batch_norm` takes it for a batch norm over all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, ...)."""
        return super(nn.SyncBatchNorm, self).forward(_Exchange.apply(x) if self.training else x)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Communicates as torch.nn.SyncBatchNorm does for x (B, C, ...), and returns x. The forward pass gathers the mean
    and deviation of each channel and the number of values; the backward pass sums two values per channel."""

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
