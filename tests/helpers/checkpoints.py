"""Checkpoints in a folder or an S3 server, and states that show of which step they are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.s3.server import Swift

from eagleray.engine import checkpoint
from eagleray.engine.checkpoint_files import last_epoch
from eagleray.storage import store


@dataclass
class Place:
    """Where the checkpoints of one test are kept."""

    url: str
    scratch: Path
    swift: Swift | None = None

    def writer(self, *, keep: int = 2, patience: float = 60) -> checkpoint.Writer:
        return checkpoint.Writer(self.url, keep=keep, scratch=self.scratch, patience=patience)

    def newest(self, scratch: Path | None = None) -> dict[str, Any] | None:
        return checkpoint.newest(self.url, scratch or self.scratch)

    def files(self) -> set[str]:
        folder = self.url + "/"
        if not self.swift and not Path(self.url).exists():
            return set()
        return {b.url.removeprefix(folder) for b in store.store(folder).list(folder)}

    def data(self, name: str) -> Path:
        """The file on some disk that holds a checkpoint."""
        if not self.swift:
            return Path(self.url, name)
        size = store.store(self.url).list(f"{self.url}/{name}")[0].size
        found = [p for p in self.swift.root.rglob("*.data") if p.stat().st_size == size]
        return max(found, key=lambda p: p.stat().st_mtime_ns)


def s3_place(swift: Swift, tmp_path: Path) -> Place:
    return Place(f"s3://runs/{tmp_path.name}/checkpoints", tmp_path / "scratch", swift)


def full_of(step: int, size: int = 1000) -> dict[str, Any]:
    """A state that shows by every number of it of which step it is."""
    return {"step": step, "parts": [torch.full((size,), float(step)), {"count": torch.tensor(step)}]}


def assert_full_of(state: dict[str, Any] | None, step: int) -> None:
    assert state is not None
    assert state["step"] == step
    assert (state["parts"][0] == step).all()
    assert state["parts"][1]["count"] == step


def keep_one(writer: checkpoint.Writer, step: int, size: int = 1000) -> None:
    writer.save(step, full_of(step, size))
    writer.settle()
    assert checkpoint.manifests(writer.url)[0] == f"step-{step:09d}"


def save(url: str | Path, step: int, state: dict[str, Any], *, keep: int = 1, scratch: Path | None = None) -> None:
    """Write one checkpoint, with the epoch of the newest one, and wait until it counts."""
    writer = checkpoint.Writer(url, keep=keep, scratch=scratch, epoch=last_epoch(checkpoint.blobs_of(url)))
    writer.save(step, state)
    writer.settle()
