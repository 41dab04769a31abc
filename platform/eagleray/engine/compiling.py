"""Compile the backbones and heads of a method with torch.compile, if a compiler is available."""

from typing import Literal

import torch
from torch import nn

from eagleray.base.compilers import missing_compiler
from eagleray.base.devices import is_accelerator
from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.models.heads import PrototypeHead

# Largest number of compiled versions of a function. Each model needs one per list of view sizes; the default is 8.
VERSIONS = 64


def compiles(choice: Literal["auto"] | bool, device: torch.device) -> bool:
    """Return whether the backbones of a run on this device are compiled.

    `auto` compiles on an accelerator that has a compiler, never on a CPU. Raises UserError for `compile=true` without a
    compiler."""
    lacks = missing_compiler(device)
    if choice is True and lacks:
        raise UserError(f"compile=true: torch.compile needs {lacks} on this machine; expected compile=auto or false")
    return choice is True or (choice == "auto" and is_accelerator(device) and not lacks)


def compile_backbones(method: nn.Module) -> None:
    """Make every backbone and prototype head of a method train compiled. Parameters and buffers keep their names."""
    torch._dynamo.config.recompile_limit = VERSIONS
    for part in method.modules():
        if isinstance(part, Backbone | PrototypeHead):
            part.compiled = True
