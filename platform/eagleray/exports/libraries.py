"""The names of the libraries that load exports, and a check that one is known and installed, without importing it."""

import importlib.util

from eagleray.base.errors import UserError

NEEDS: dict[str, tuple[str, ...]] = {  # by library, the packages of the extra `export` that it needs
    "timm": (),
    "timm-hub": (),
    "transformers": ("transformers",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "torch.export": (),
}


def check_target(to: str) -> None:
    """Raises UserError for a library that Eagleray has no exports for, or whose packages are missing."""
    if to not in NEEDS:
        raise UserError(f"--to {to}: unknown; expected {', '.join(NEEDS)}")
    missing = [name for name in NEEDS[to] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--to {to}: needs {', '.join(missing)}: pip install 'eagleray[export]'")
