"""Record the packages, the machine and the command that a run was made with."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable
from typing import Any

from eagleray.base import devices
from eagleray.base.errors import hide_secrets
from eagleray.config import plugins
from eagleray.storage import store


def environment() -> dict[str, Any]:
    """Return the contents of environment.json: versions of packages, the machine and the command."""
    names = ("eagleray", "torch", "torchvision", "timm", "numpy", "pillow", "ray", "mlflow", "webdataset", "boto3")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": devices.names()}
    return {
        "python": platform.python_version(),
        "packages": versions,
        **machine,
        "command": [hide_secrets(word) for word in sys.argv],
    }


def write_plugins(out: str, used: Iterable[plugins.Plugin]) -> None:
    """Write the sources of plug-ins into the folder of a run or a sweep, beside its recipe."""
    for sources in plugins.pack(used).values():
        for relative, data in sources.items():
            store.put_bytes(f"{out}/{plugins.FOLDER}/{relative}", data)
