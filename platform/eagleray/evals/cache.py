"""Frozen features on disk, named after the weights and the images that they are of: no protocol computes them again."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagleray.data.index import Index
from eagleray.evals.features import Labelled

FORMAT = 1  # changes with what a file holds and with how images become features


def folder() -> Path:
    """Beside the working folders of remote runs. Any file there may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagleray" / "features"


def data_digest(index: Index, samples: NDArray[np.int64]) -> str:
    """A short name of some samples: what their shards hold, whatever folder they lie in, and their labels."""
    total = hashlib.sha256(json.dumps([(b.url.rpartition("/")[2], b.size, b.tag) for b in index.shards]).encode())
    total.update(samples.tobytes())
    total.update(index.label[samples].tobytes())
    return total.hexdigest()[:16]


def cached(
    backbone: str,
    data: str,
    kinds: Sequence[str],
    *,
    how: Sequence[object],
    make: Callable[[Sequence[str]], dict[str, Labelled]],
    note: Callable[[str], None],
) -> dict[str, Labelled]:
    """Features of each kind, for the digests of a backbone and of data; `how` is all else that they depend on. Those
    that are not on disk are made together, and kept."""
    paths = {}
    for kind in kinds:
        key = hashlib.sha256(json.dumps([FORMAT, backbone, data, kind, *how]).encode()).hexdigest()[:24]
        paths[kind] = folder() / f"{key}.safetensors"
    found = {kind: features for kind, path in paths.items() if (features := _load(path)) is not None}
    if missing := [kind for kind in kinds if kind not in found]:
        made = make(missing)
        for kind, features in made.items():
            try:
                _save(paths[kind], features)
            except (OSError, SafetensorError) as e:
                note(f"{folder()}: features cannot be kept there: {e}")
        found |= made
    return {kind: found[kind] for kind in kinds}


def _load(path: Path) -> Labelled | None:
    """None where there is no such file, or one that is damaged."""
    try:
        return Labelled(**load_file(path))
    except (OSError, SafetensorError, TypeError):
        return None


def _save(path: Path, features: Labelled) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({"x": features.x.contiguous(), "y": features.y.contiguous()}, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
