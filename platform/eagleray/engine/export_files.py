"""Name the files of an export and find them, before PyTorch is imported to read them."""

import os
from pathlib import Path

from eagleray.storage.store import folder_of, store

FILE = "backbone.safetensors"
DESCRIPTION = "backbone.json"  # how to create the model
CARD = "README.md"
CONFIG = "config.json"  # timm creates the model from it
# What was merged into the backbone: `backbone.lora`. timm loads the first file by name, which has to be the backbone's.
ADAPTERS = "lora.safetensors"
HEADS = "heads.safetensors"  # the other parts of the method


def export_in(source: str | os.PathLike[str]) -> Path | None:
    """Return the exported file that a path or URL names, itself or by its folder, on this machine; None for anything
    else. Raises UserError and Outage."""
    path = folder_of(url := os.fspath(source).rstrip("/"))
    if path is None:
        return _remote_export(url)
    path = path.expanduser()
    file = path / FILE if path.is_dir() else path
    return file if file.suffix == ".safetensors" and file.with_suffix(".json").exists() else None


def _remote_export(url: str) -> Path | None:
    from eagleray.storage.folder_copy import local_folder  # shows progress with rich, which the core does without

    folder, name = url.rsplit("/", 1) if url.endswith(".safetensors") else (url, FILE)
    stem = Path(name).stem
    names = {blob.url.rpartition("/")[2] for blob in store(url).list(f"{folder}/", stem)}
    return local_folder(folder) / name if names >= {name, f"{stem}.json"} else None
