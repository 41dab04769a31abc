"""The names of the files of an export, and a function that finds them without importing PyTorch."""

import os
from pathlib import Path

from eagleray.storage.store import folder_of, store

FILE = "backbone.safetensors"
DESCRIPTION = "backbone.json"  # file that says how to create the model
CARD = "README.md"
CONFIG = "config.json"  # file from which timm creates the model
# Adapters, which are merged into FILE too. This name sorts after FILE, as timm loads the first file in a folder.
ADAPTERS = "lora.safetensors"
HEADS = "heads.safetensors"  # file with the heads and other parts of the method


def export_in(source: str | os.PathLike[str]) -> Path | None:
    """Return the local path of an exported file, or None when there is no export. `source` is the path or URL of the
    file or of its folder; files at a URL are downloaded. Raises UserError and Outage when a store cannot be read."""
    path = folder_of(url := os.fspath(source).rstrip("/"))
    if path is None:
        return _remote_export(url)
    path = path.expanduser()
    file = path / FILE if path.is_dir() else path
    return file if file.suffix == ".safetensors" and file.with_suffix(".json").exists() else None


def _remote_export(url: str) -> Path | None:
    from eagleray.storage.folder_copy import local_folder  # imports rich, a package that training must not need

    folder, name = url.rsplit("/", 1) if url.endswith(".safetensors") else (url, FILE)
    stem = Path(name).stem
    names = {blob.url.rpartition("/")[2] for blob in store(url).list(f"{folder}/", stem)}
    return local_folder(folder) / name if names >= {name, f"{stem}.json"} else None
