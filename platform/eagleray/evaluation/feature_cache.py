"""Store frozen features on disk, so that protocols of later commands need not extract them again.

The name of a file is a digest of the weights, the images and the settings of the extraction."""

from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagleray.base import dist
from eagleray.base.files import cache_folder, durable_path
from eagleray.protocols.digests import digest
from eagleray.protocols.features import LabelledFeatures

FORMAT = 2  # version, to be increased when files or the extraction of features change


def folder() -> Path:
    """Return the folder of the cache. Its files can be deleted at any time."""
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
    """Return the features of each type in `kinds` from the cache. Missing types are extracted by `make`, and stored.

    `backbone` and `data` are digests, and `how` is everything else on which the features depend. Called by all ranks
    together, each with its own data. If one rank lacks a type, all ranks extract it."""
    paths = {}
    for kind in kinds:
        paths[kind] = folder() / f"{digest(FORMAT, backbone, data, kind, *how)}.safetensors"
    cache = {kind: features for kind, path in paths.items() if (features := _load(path)) is not None}
    known = set(cache).intersection(*dist.gather_objects(set(cache)))
    if missing := [kind for kind in kinds if kind not in known]:
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
    with durable_path(path) as part:
        save_file({"x": features.x.contiguous(), "y": features.y.contiguous()}, part)
