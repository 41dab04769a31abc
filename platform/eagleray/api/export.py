"""Load backbones as modules, and export them as files that other libraries load."""

import os
from collections.abc import Sequence
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.config import plugins as loading
from eagleray.engine.export import read_export, to_timm
from eagleray.models import weights
from eagleray.models.backbone import Backbone
from eagleray.storage.store import absolute, is_remote


def load(
    source: str | os.PathLike[str], *, architecture: str | None = None, plugins: Sequence[str | Path] = ()
) -> Backbone:
    """Return a backbone as a PyTorch module, in evaluation mode on the CPU.

    `source` is a `Run`, a run's folder or s3:// URL, a checkpoint, an exported backbone.safetensors or its folder,
    `timm:NAME`, or any file of tensors together with timm's name of its `architecture`. The module's `model` is the
    network of timm.

    Raises UserError when there is nothing that can be loaded.

    Example:

        import torch

        backbone = eagleray.load("runs/a")
        same = eagleray.load("runs/a/export/backbone.safetensors")
        images = torch.randn(2, 3, 32, 32)
        with torch.inference_mode():
            features = backbone(images)
            assert torch.allclose(features.pooled, same(images).pooled, atol=1e-5)
        features.pooled.shape, features.patches.shape  # (2, D), (2, N, D)
    """
    loading.use(plugins)
    name = os.fspath(source)
    if architecture is None and not is_remote(name) and not name.startswith(weights.TIMM):
        path = Path(name).expanduser()
        file = path / "backbone.safetensors" if path.is_dir() else path
        if file.suffix == ".safetensors" and file.with_suffix(".json").exists():
            return read_export(file)
    from eagleray.evaluation.target import load_target  # not for an export, which is loaded in a moment

    try:
        return load_target(name, architecture).backbone
    except UserError as e:
        raise UserError(str(e).replace("--architecture NAME", "architecture=NAME")) from None


def export(
    source: str | os.PathLike[str], destination: str | Path | None = None, *, plugins: Sequence[str | Path] = ()
) -> Path:
    """Write a run's or a checkpoint's backbone as `backbone.safetensors` with `backbone.json`, which says how timm or
    `eagleray.load` creates it, and return the file.

    It is written into the folder `destination`, by default the run's `export/`, and counts only after a fresh process
    has loaded it and got the same outputs. Raises UserError when it does not.

    Example:

        file = eagleray.export("runs/a", "exported")
        backbone = eagleray.load(file)
    """
    from eagleray.runs.restore import restore

    loading.use(plugins)
    recipe, method, folder = restore(absolute(os.fspath(source).rstrip("/")))
    return to_timm(method.export(), recipe.backbone, Path(destination or folder / "export"))
