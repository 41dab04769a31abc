"""The number format of training steps, which is float32, bfloat16, or float16 with a scaled loss (Micikevicius et al.
2018, arXiv:1710.03740), and PyTorch's numeric settings for a whole process.

Parameters, gradients and moments are float32 in each format; autocast decides which operations use the shorter format.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn

from eagleray.base.dist import local
from eagleray.base.errors import UserError
from eagleray.config.types import NO_FP16, Format

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Defaults of torch.amp.GradScaler: first scale, factor after INTERVAL finite steps, factor after an overflow, INTERVAL.
START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


def compute_dtype(choice: Format, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products on a device.

    `auto` is bfloat16 on an accelerator that has it, float16 on one that has not (V100, T4), and float32 on a CPU.
    Raises UserError for a format that the device does not compute in."""
    if choice == "auto":
        choice = "fp32" if device.type == "cpu" else "bf16" if has_bfloat16(device) else "fp16"
    elif choice == "fp16" and device.type == "cpu":
        raise UserError(NO_FP16)
    elif choice == "bf16" and not has_bfloat16(device):
        raise UserError(f"precision=bf16: this {device.type} device has no bfloat16; expected auto, fp16 or fp32")
    return DTYPES[choice]


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device computes in bfloat16. A CPU does, if slowly."""
    # By default, CUDA reports emulated bfloat16 as supported, too, as on a V100.
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return supported is None or bool(supported(including_emulation=False))


def format_name(device: torch.device) -> str:
    """Return PyTorch's name of the number format used on a device, such as `bfloat16`. Results record it."""
    return str(compute_dtype("auto", device)).removeprefix("torch.")


def autocast(device: torch.device, choice: Format = "auto") -> torch.autocast:
    """Return the autocast context for a network on a device. Raises UserError as `compute_dtype` does."""
    return _autocast(device, compute_dtype(choice, device))


def _autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    half = dtype != torch.float32
    return torch.autocast(device.type, dtype if half else torch.bfloat16, enabled=half)


class Precision:
    """The dtype of a run's matrix products and, for float16, the scale of its loss.

    Float16 has no numbers below 6e-8, but many gradients are smaller. So gradients of the scaled loss are computed and
    then divided by the scale. A step whose gradients overflow is skipped. The host never waits for the device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.scaled = dtype == torch.float16
        self.loss_scale = torch.full((), START, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)  # finite steps since the last new scale

    @classmethod
    def of(cls, choice: Format, device: torch.device) -> "Precision":
        """Return the precision that a recipe asks for. Raises UserError as `compute_dtype` does."""
        return cls(compute_dtype(choice, device), device)

    def autocast(self) -> torch.autocast:
        """Return the autocast context for the forward pass and the loss."""
        return _autocast(self.device, self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate: multiplied by the scale in float16, else unchanged."""
        return loss * self.loss_scale if self.scaled else loss

    def unscale_(self, grads: Sequence[Tensor]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.scaled:
            torch._foreach_mul_(local(grads), self.loss_scale.reciprocal())

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after a step. `overflow`, a scalar tensor, is 1.0 if a gradient was not finite, else 0.0."""
        if self.scaled:
            torch._amp_update_scale_(self.loss_scale, self.good_steps, overflow, GROWTH, BACKOFF, INTERVAL)

    def values(self) -> dict[str, Tensor]:
        """Return the values to log for a step: the scale of its loss, or nothing if the loss is not scaled."""
        return {"loss_scale": self.loss_scale.clone()} if self.scaled else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of finite steps since it changed, or nothing if the loss is not scaled."""
        return {"loss_scale": self.loss_scale, "good_steps": self.good_steps} if self.scaled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the scale of a checkpoint; `state` is empty if the checkpoint's run was not in float16."""
        for name in state if self.scaled else ():
            getattr(self, name).copy_(state[name])


@contextlib.contextmanager
def numerics(precision: Precision, *, deterministic: bool) -> Iterator[None]:
    """A context with PyTorch's numeric settings for a run, which are reset at its end.

    On an accelerator, products and convolutions of float32 numbers use TF32, with 10 bits of mantissa instead of 23,
    unless the whole run is in fp32. With `deterministic`, every operation gives the same bits each time. Then UserError
    is raised when an operation of the run cannot do so, or when cuBLAS was used before the context."""
    matmul, convolution = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    repeatable = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, accelerator = cudnn.benchmark, precision.device.type != "cpu"  # "high" below is TF32, but not on a CPU
    try:
        if accelerator:
            tf32 = precision.dtype != torch.float32
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            cudnn.allow_tf32 = tf32
            cudnn.benchmark = True  # measures once for each shape which algorithm is fastest
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its first product
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
    """A context in which float32 products do not use TF32, so that evaluations in a run match `eagleray evaluate`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
