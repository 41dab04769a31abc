"""List the libraries that load exports, and check without an import that a library is known and installed."""

import importlib.util

from eagleray.base.errors import UserError

NEEDS: dict[str, tuple[str, ...]] = {  # packages that each library needs, all in the extra `export`
    "timm": (),
    "timm-hub": (),
    "transformers": ("transformers",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "torch.export": (),
}


def check_target(to: str) -> None:
    """Raises UserError when Eagleray has no exports for the library `to`, or when its packages are missing."""
    if to not in NEEDS:
        raise UserError(f"--to {to}: unknown; expected {', '.join(NEEDS)}")
    missing = [name for name in NEEDS[to] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--to {to}: needs {', '.join(missing)}: pip install 'eagleray[export]'")
