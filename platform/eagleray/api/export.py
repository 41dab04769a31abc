"""Load backbones as modules, and export them as files that other libraries load."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagleray.base.console import say_loading
from eagleray.base.contexts import kept_generators
from eagleray.base.errors import UserError, reworded
from eagleray.base.files import check_local
from eagleray.config import plugins as loading
from eagleray.engine.export_files import FILE, export_in
from eagleray.exports.libraries import check_target
from eagleray.runs.sources import check_run
from eagleray.storage.store import absolute, is_remote

if TYPE_CHECKING:
    from eagleray.exports.verify import Verified
    from eagleray.exports.write import Written
    from eagleray.models.backbone import Backbone


@kept_generators()
def load(
    source: str | os.PathLike[str], *, architecture: str | None = None, plugins: Sequence[str | Path] = ()
) -> "Backbone":
    """Load a backbone as a PyTorch module, in evaluation mode on the CPU.

    `source` is a `Run`, a run's folder or s3:// URL, a checkpoint, an exported backbone.safetensors or its folder,
    `timm:NAME`, or a file of tensors. For a file of tensors, `architecture` is the timm name of the network. The
    attribute `model` of the returned module is the timm network.

    Raises UserError if `source` contains no backbone that can be loaded.

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
    if architecture is None and (file := export_in(name)):
        from eagleray.engine.export import read_export

        return read_export(file).backbone
    from eagleray.evaluation.given import check_backbone

    check_backbone(name, architecture)
    from eagleray.evaluation.target import load_target

    with reworded(("--architecture NAME", "architecture=NAME")):
        return load_target(name, architecture).backbone


def export(
    source: str | os.PathLike[str],
    destination: str | Path | None = None,
    *,
    to: Literal["timm", "timm-hub", "transformers", "onnx", "torch.export"] = "timm",
    what: str | None = None,
    heads: bool = False,
    licence: str = "",
    plugins: Sequence[str | Path] = (),
) -> Path:
    """Export the backbone of a run or a checkpoint, and return the path that the library `to` loads. The path is a
    folder for timm-hub and transformers, and a file for the other libraries.

    `destination` is the folder for the files. By default the files go into the folder `export/` of the run. If `to` is
    not timm, if `what` is set, or if `source` is a checkpoint, the files go into a subfolder such as `export/onnx` or
    `export/student-step-100`; for a run in a bucket, they go into its copy on this machine, for timm to `export/timm`.
    `export` loads the files in a new process with that library alone, and keeps them only if ten photographs give the
    same features as in Eagleray. `what` names an encoder of the method, such as `student`; by default `export` uses the
    encoder that the run evaluates. With `heads=True`, `export` adds a file with the method's heads, centres and
    queues. Only `start.from` reads this file. `licence` names the licence under which you publish the weights.

    Raises UserError if the features differ, or if the library cannot build this network.

    Example:

        file = eagleray.export("runs/a", "exported")
        backbone = eagleray.load(file)
    """
    files = {"timm": FILE, "onnx": "backbone.onnx", "torch.export": "backbone.pt2"}
    folder = write(source, destination, to=to, what=what, heads=heads, licence=licence, plugins=plugins).folder
    return folder / files[to] if to in files else folder


def write(
    source: str | os.PathLike[str],
    destination: str | Path | None = None,
    *,
    to: str = "timm",
    what: str | None = None,
    heads: bool = False,
    licence: str = "",
    plugins: Sequence[str | Path] = (),
) -> "Written":
    """Do the same as `export`, and return what was written."""
    check_target(to)
    if destination:
        check_local("--destination", Path(destination))
    if heads and to != "timm":
        raise UserError(f"--heads: not with --to {to}; start.from reads them from an export for timm")
    loading.use(plugins)
    url = absolute(os.fspath(source).rstrip("/"))
    check_run(url)
    say_loading()
    from eagleray.exports.source import load_source
    from eagleray.exports.write import write as write_export

    found = load_source(url, what)
    step = f"step-{found.step}" if found.step is not None else ""
    kind = "-".join(part for part in ("" if to == "timm" else to, what, step) if part)
    kind = kind or (to if is_remote(url) else "")  # commands download what is directly in export/ again
    folder = Path(destination or found.folder / "export" / kind)
    return write_export(found, to, folder, with_heads=heads, licence=licence)


def verify(export: str | os.PathLike[str]) -> "Verified":
    """Verify an export, and return what it says of its weights. `export` is its folder, local or in a store.

    `verify` computes the digests of all files and tensors again, and compares what the card, the settings and
    provenance.json say. It needs no PyTorch. The result's `facts` name backbone, recipe, steps, commit, images and
    start weights, and `conditions` the licences that ask for something. Whoever rewrites all files of an export can
    rewrite their digests too: compare `sha256` with the one that the publisher names.

    Raises UserError, which names the file, tensor or fact that was changed, and Outage.

    Example:

        verified = eagleray.verify("runs/a/export")
        verified.facts.steps, verified.conditions, verified.sha256
    """
    from eagleray.exports.verify import verify as verify_folder
    from eagleray.storage.folder_copy import local_folder

    return verify_folder(local_folder(os.fspath(export)))
