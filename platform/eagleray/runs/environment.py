"""What a run was made with: packages, machine and command."""

import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import torch

from eagleray import config
from eagleray.config import plugins
from eagleray.runs import layout, remote
from eagleray.runs.recipe import Recipe
from eagleray.storage import store


def environment() -> dict[str, Any]:
    """Versions of packages, the machine and the command, as the run folder's environment.json keeps them."""
    names = ("eagleray", "torch", "torchvision", "timm", "numpy", "pillow", "ray", "mlflow", "webdataset", "boto3")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": devices}
    return {"python": platform.python_version(), "packages": versions, **machine, "command": sys.argv}


def write_sources(out: str, recipe: Recipe) -> None:
    """Write the resolved recipe, the sources of its plug-ins and the environment into the run's folder."""
    remote.put(out, layout.RECIPE, config.dump(recipe))
    for sources in plugins.pack(recipe.plugins).values():
        for relative, data in sources.items():
            store.put_bytes(f"{out}/{plugins.FOLDER}/{relative}", data)
    remote.put(out, layout.ENVIRONMENT, json.dumps(environment(), indent=1))
