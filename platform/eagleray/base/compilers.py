"""Find out whether a machine has what it needs to compile code for its devices during a run."""

import importlib.util
import os
import shutil

import torch

from eagleray.base.devices import is_accelerator


def missing_compiler(device: torch.device) -> str | None:
    """Return what torch.compile needs for a device but is missing, or None: for a CPU, a C++ compiler is needed; for an
    accelerator, Triton and a C compiler."""
    if not is_accelerator(device):
        compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
        return None if any(map(shutil.which, compilers)) else "a C++ compiler (" + " or ".join(compilers) + ")"
    if importlib.util.find_spec("triton") is None:
        return "Triton (the package triton)"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return None if any(map(shutil.which, compilers)) else "a C compiler (" + " or ".join(compilers) + ")"
