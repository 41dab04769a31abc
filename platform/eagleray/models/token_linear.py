"""Computes linear layers of many tokens as 1 x 1 convolutions, which are twice as fast on some CPUs.

PyTorch multiplies matrices with MKL, which uses only AVX2 on AMD's CPUs, and convolves with oneDNN, which uses AVX-512
there too. docs/decisions/0045-linear-layers-on-amd.md has the figures."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

Network = TypeVar("Network", bound=nn.Module)

CPUINFO = Path("/proc/cpuinfo")
ROWS = 256  # fewest input rows for a convolution; with fewer, reading the weights is the larger part of the work
# Fewest images into which rows are divided: with fewer, PyTorch multiplies matrices even in a 1 x 1 convolution.
IMAGES = 16
PIXELS = 256  # most pixels of an image, one per row; with more, gradients of weights are slow


class TokenLinear(nn.Linear):
    """A linear layer that convolves if its input has many rows.

    In eval mode it always convolves, with rows of zeros added if there are too few. Then every bit of a row's output is
    independent of the other rows, unlike in a matrix product. So features are equal however images are divided into
    batches and workers."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):  # these choose kernels themselves
            return super().forward(input)
        rows = input.shape[:-1].numel()
        if not self.training:
            return self.convolve_padded(input.reshape(rows, -1)).view(*input.shape[:-1], -1)
        if rows < ROWS:
            return super().forward(input)
        images = divided(rows)
        x, left = input.reshape(rows, -1), rows % images
        y = self.convolve(x[: rows - left], images)
        if left:
            y = torch.cat([y, super().forward(x[-left:])])
        return y.view(*input.shape[:-1], -1)

    def convolve_padded(self, x: Tensor) -> Tensor:
        """Return the outputs (R, D) for any number of rows (R, C), padded with rows of zeros as far as needed."""
        least = max(len(x), ROWS)
        images = divided(least)
        missing = least + -least % images - len(x)
        return self.convolve(functional.pad(x, (0, 0, 0, missing)) if missing else x, images)[: len(x)]

    def convolve(self, x: Tensor, images: int) -> Tensor:
        """Return the outputs (R, D) for rows (R, C), R a multiple of `images`."""
        x = x.reshape(images, -1, 1, self.in_features).permute(0, 3, 1, 2)  # channels last
        y = functional.conv2d(x, self.weight[:, :, None, None], self.bias)
        return y.permute(0, 2, 3, 1).reshape(-1, self.out_features)


def on_device(network: Network, device: torch.device) -> Network:
    """Move a network to a device, and let its linear layers convolve if that is faster there.

    Parameters keep their names. Outputs differ by rounding."""
    network.to(device)
    if device.type == "cpu" and convolutions_are_faster():
        for part in network.modules():
            if type(part) is nn.Linear:  # subclasses may compute something else
                part.__class__ = TokenLinear
    return network


@contextmanager
def plain(network: nn.Module) -> Iterator[None]:
    """A context in which all linear layers of a network are matrix products, as on any other device."""
    parts: list[nn.Module] = [part for part in network.modules() if type(part) is TokenLinear]
    for part in parts:
        part.__class__ = nn.Linear
    try:
        yield
    finally:
        for part in parts:
            part.__class__ = TokenLinear


@functools.cache
def convolutions_are_faster() -> bool:
    """Return whether this machine has an AMD CPU with AVX-512, and PyTorch has oneDNN."""
    amd = CPUINFO.exists() and "AuthenticAMD" in CPUINFO.read_text()
    return amd and torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def divided(rows: int) -> int:
    """Return the number of equal images into which `rows` >= ROWS rows are divided; some rows may be left over."""
    least = max(IMAGES, -(-rows // PIXELS))
    return next((n for n in range(least, rows // IMAGES + 1) if rows % n == 0), least)
