"""Checkpoints that can be trusted: written aside, verified by checksum, the newest intact one wins."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


def save(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> None:
    """Write `step-<step>.pt` and, once that is on disk, the manifest that makes it count; then drop old ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:09d}.pt"
    part = path.with_suffix(".part")
    with part.open("wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    part.replace(path)
    replace(path.with_suffix(".json"), json.dumps({"step": step, "bytes": path.stat().st_size, "sha256": sha256(path)}))
    known = manifests(folder)
    later = [m for m in known if m.stem > path.stem]  # damaged ones, that this run began before
    for old in later + [m for m in known if m not in later][keep:]:
        old.unlink()
        old.with_suffix(".pt").unlink(missing_ok=True)


def newest(folder: Path) -> dict[str, Any] | None:
    """The state of the newest intact checkpoint, or None; damaged ones are passed over with a warning."""
    for manifest in manifests(folder):
        path = manifest.with_suffix(".pt")
        if intact(path):
            return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
        log.warning("checkpoint %s is damaged and passed over", path)
    return None


def manifests(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*.json"), reverse=True)


def intact(path: Path) -> bool:
    """Whether a checkpoint is what its manifest says."""
    try:
        said = json.loads(path.with_suffix(".json").read_text())
        return path.stat().st_size == said["bytes"] and sha256(path) == said["sha256"]
    except (OSError, ValueError, KeyError):
        return False


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def replace(path: Path, text: str) -> None:
    """Write a small file so that readers see the old one or the new one, never a part."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    part.replace(path)
