"""Refuse what a machine without an accelerator cannot do for a run. This needs no PyTorch."""

from eagleray.base.errors import UserError
from eagleray.config.types import Format


def check(gpus: bool | None, precision: Format) -> None:
    """Raises UserError when a run asks for an accelerator, or for a number format that a CPU does not compute in."""
    if gpus:
        raise no_accelerator()
    check_format(precision)


def check_format(choice: Format) -> None:
    """Raises UserError for a number format that a CPU does not compute in."""
    if choice == "fp16":
        raise UserError("precision=fp16: a CPU trains in fp32 or, more slowly, in bf16; expected auto, fp32 or bf16")


def no_accelerator() -> UserError:
    """Return the error of a run that asks for an accelerator where there is none."""
    return UserError(
        "gpus=true: PyTorch finds no accelerator on this machine; expected gpus=null to train on its CPU, or a cluster "
        "in RAY_ADDRESS with workers=N"
    )
