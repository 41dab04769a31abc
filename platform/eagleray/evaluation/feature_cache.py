"""Cache frozen features on disk under digests of the weights and the images, so that no protocol extracts them
again."""

from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagleray.base.files import atomic_path, cache_folder
from eagleray.protocols.digests import digest
from eagleray.protocols.features import LabelledFeatures

FORMAT = 1  # increased when the content of a file or the extraction of features changes


def folder() -> Path:
    """Return the folder of cached features. Any file in it may be deleted."""
    return cache_folder("features")


def cached(
    backbone: str,
    data: str,
    kinds: Sequence[str],
    *,
    how: Sequence[object],
    make: Callable[[Sequence[str]], dict[str, LabelledFeatures]],
    note: Callable[[str], None],
) -> dict[str, LabelledFeatures]:
    """Return features of each type for the digests of a backbone and of data; `how` is everything else that they depend
    on. `make` extracts the types that are not in the cache, which are then stored."""
    paths = {}
    for kind in kinds:
        paths[kind] = folder() / f"{digest(FORMAT, backbone, data, kind, *how)}.safetensors"
    cache = {kind: features for kind, path in paths.items() if (features := _load(path)) is not None}
    if missing := [kind for kind in kinds if kind not in cache]:
        extracted = make(missing)
        for kind, features in extracted.items():
            try:
                _save(paths[kind], features)
            except (OSError, SafetensorError) as e:
                note(f"{folder()}: features cannot be stored there, so a later command extracts them again: {e}")
        cache |= extracted
    return {kind: cache[kind] for kind in kinds}


def _load(path: Path) -> LabelledFeatures | None:
    """Load features from a file; return None if it is missing or damaged."""
    try:
        return LabelledFeatures(**load_file(path))
    except (OSError, SafetensorError, TypeError):
        return None


def _save(path: Path, features: LabelledFeatures) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        save_file({"x": features.x.contiguous(), "y": features.y.contiguous()}, part)
