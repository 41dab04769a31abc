"""PyTorch's switches for a whole process that decide how exactly, and how repeatably, a device computes."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch.backends import cudnn

from eagleray.base.errors import UserError
from eagleray.engine.precision import Precision


@contextlib.contextmanager
def numerics(precision: Precision, *, deterministic: bool) -> Iterator[None]:
    """Set the switches for a run, and set them back at its end.

    On an accelerator, products and convolutions of float32 numbers use TF32, with 10 bits after the point instead of
    23, unless the whole run is in fp32. With `deterministic`, every operation gives the same bits each time. Raises
    UserError when an operation of the run cannot.
    """
    matmul, convolution = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    repeatable = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, accelerator = cudnn.benchmark, precision.device.type != "cpu"  # on a CPU "high" means another format
    try:
        if accelerator:
            tf32 = precision.dtype != torch.float32
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            cudnn.allow_tf32 = tf32
            cudnn.benchmark = True  # picks a convolution's algorithm by a measurement, once for each shape
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
            torch.use_deterministic_algorithms(True)
            cudnn.benchmark = False
        yield
    except RuntimeError as e:
        if deterministic and "CUBLAS_WORKSPACE_CONFIG" in str(e):
            raise UserError(
                "deterministic=true: this process has multiplied on the GPU before, so that cuBLAS cannot be switched "
                "any more; begin in a new process, or set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts"
            ) from e
        operation, separator, _ = str(e).partition(" does not have a deterministic implementation")
        if not (deterministic and separator):
            raise
        raise UserError(f"deterministic=true: PyTorch computes {operation} in no fixed order on this device") from e
    finally:
        if accelerator:
            torch.set_float32_matmul_precision(matmul)
            cudnn.allow_tf32 = convolution
        if deterministic:
            torch.use_deterministic_algorithms(repeatable, warn_only=warn_only)
        cudnn.benchmark = benchmark


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute products of float32 numbers in float32, within a run as `eagleray evaluate` does without one."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
