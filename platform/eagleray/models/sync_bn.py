"""Batch norm over the rows of all ranks: PyTorch's layer where it has one, and an equivalent elsewhere."""

import torch
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

from eagleray.base import dist
from eagleray.base.errors import UserError

KERNELS = ("cuda", "xpu")  # the devices, of NVIDIA and AMD, and of Intel, that have kernels for PyTorch's layer


class PortableSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over the rows of all ranks, which may have different numbers of rows. B images, C channels."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim >= 2

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, ...)."""
        if not self.training or dist.size() == 1:
            return super().forward(x)
        axes, shape = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
        n = dist.total(x.new_full((1,), x.numel() / x.shape[1]))
        mean = dist.total_with_grad(x.sum(axes)) / n
        centred = x - mean.view(shape)
        var = dist.total_with_grad(centred.square().sum(axes)) / n
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                self.running_mean.lerp_(mean, self.momentum or 0.1)
                self.running_var.lerp_(var * n / (n - 1), self.momentum or 0.1)
        out = centred * torch.rsqrt(var + self.eps).view(shape)
        return torch.addcmul(self.bias.view(shape), out, self.weight.view(shape)) if self.affine else out


def sync_batch_norms(module: nn.Module, device: torch.device) -> nn.Module:
    """Turn every batch norm of a module, in place, into one over all ranks, with the same weights and buffers.

    Raises UserError for a kind of batch norm other than PyTorch's 1d and 2d on a device other than those of KERNELS.
    """
    if device.type in KERNELS:
        return convert_sync_batchnorm(module)  # timm's, which keeps the activations of its own batch norms
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and type(child) not in (nn.BatchNorm1d, nn.BatchNorm2d):
            raise UserError(
                f"workers: expected 1, because the backbone's {type(child).__name__} is synchronised on "
                f"{' and '.join(KERNELS)} devices only"
            )
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            child.__class__ = PortableSyncBatchNorm  # type: ignore[assignment]  # the same parameters and buffers, another forward
    return module
