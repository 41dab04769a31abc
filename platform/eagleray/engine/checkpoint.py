"""Writes checkpoints in the background while training goes on, and reads them.

A checkpoint counts once it has been read back from its folder or store with the right checksum. A run continues from
the newest intact one. In a store, where two processes may write to one run, a checkpoint's name ends with the epoch of
its writer: `step-000000110-e000002`. This is no epoch of training; each start of the run gets a higher one. A later
epoch is newer, whatever the step."""

import contextlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eagleray.base.contexts import on_error
from eagleray.base.errors import Outage, Superseded, UserError
from eagleray.base.files import atomic_path, file_lock, make_folder, write_atomic
from eagleray.engine.checkpoint_files import (
    agrees,
    epoch_of,
    fetch,
    flush,
    names_in,
    order,
    parse_manifest,
    pieces,
    sha256,
    sha256_of,
    stem,
    step_name,
    step_of,
)
from eagleray.engine.serialise import NOT_NUMBERS, HostCopy, ruined, serialise
from eagleray.storage.blob import Blob
from eagleray.storage.error_classes import MissingFile
from eagleray.storage.retry import PATIENCE
from eagleray.storage.store import folder_of, store

log = logging.getLogger(__name__)
LONG = 60.0  # seconds for which requests to a store are repeated in the background
TRIES = 5  # reads of a checkpoint before it is skipped; other processes may delete its files meanwhile
NEWEST = 3  # `listing` reads the manifests of this many newest checkpoints


class Writer:
    """Writes checkpoints, one at a time, to a folder or an s3:// URL, and deletes all but the newest `keep`.

    `scratch` is a local folder for files on their way to a store and for a copy of the newest checkpoint. Checkpoints
    in a local folder need no `scratch`. A request to a store is repeated for `patience` seconds. `first` is called in
    the background before a checkpoint counts, to store the other files of the run that belong to it. `epoch` is part of
    the names of checkpoints. `guard` is called before a checkpoint counts and before old ones are deleted: it raises
    Superseded when another process has taken the run over."""

    def __init__(
        self,
        url: str | Path,
        *,
        keep: int,
        scratch: Path | None = None,
        patience: float = LONG,
        first: Callable[[], None] = lambda: None,
        epoch: int = 0,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.url, self.keep, self.patience, self.first = _url(url), keep, patience, first
        self.epoch, self.guard = epoch, guard
        self.scratch = _scratch(self.url, scratch)
        self.copies = self.scratch != folder_of(self.url)  # whether files in `scratch` are copies of those at `url`
        self._host_copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self._warned: set[str] = set()
        self.best: int | None = None  # step of the best checkpoint, which is not deleted
        self.stays: Callable[[int], bool] = lambda step: False  # whether a step's newest checkpoint is kept

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being written, so that `save` would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, state: dict[str, Any], finish: Callable[[], dict[str, Any]] = dict) -> None:
        """Copy the state and write it in the background.

        There, `finish` is called first. It waits for the files of sharded tensors, which all ranks write, and returns
        what the manifest says about them. If writing fails, a warning is logged, and `settle` raises the error."""
        self.wait()
        host_state, self._problem = self._host_copy.update(state), None
        self._thread = threading.Thread(
            target=self._run, args=(step, host_state, finish), name="checkpoint", daemon=True
        )
        self._thread.start()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written. Raises UserError or Outage when the last one was not saved."""
        self.wait()
        if self._problem:
            raise self._problem

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread:
            self._thread.join()

    def _run(self, step: int, state: dict[str, Any], finish: Callable[[], dict[str, Any]]) -> None:
        name = step_name(step, self.epoch)
        try:
            epoch = {"epoch": self.epoch} if self.epoch else {}
            self._write(name, {"step": step} | epoch | finish(), state)
        except Exception as error:
            self._problem = self._named(e := self._cause(error))
            bug = self._problem is e and not isinstance(e, Superseded)
            self._warn(f"{name} was not saved: {self._problem}", exc_info=bug)
            return
        log.debug("%s is saved and verified", name)
        try:
            self._drop(name)
        except (OSError, UserError, Outage) as e:
            self._warn(f"old checkpoints could not be deleted: {self._named(e)}")

    def _write(self, name: str, manifest: dict[str, Any], state: dict[str, Any]) -> None:
        """Write and verify the checkpoint, then its manifest, which makes it count."""
        if names := ruined(state.get("method", {})):
            raise UserError(f"{name}: {NOT_NUMBERS} {names[0]}")
        make_folder(self.scratch)
        for orphan in self.scratch.glob("step-*.part"):  # left by a killed writer; such files would fill the disk
            orphan.unlink()
        part, path, manifest_path = (self.scratch / f"{name}.{kind}" for kind in ("part", "pt", "json"))
        with atomic_path(path, part=part):
            manifest |= serialise(state, part)
            self._verify(part, f"{self.url}/{name}.pt", manifest)
            self.first()
            self.guard()
        with on_error(path.unlink), on_error(lambda: manifest_path.unlink(missing_ok=True)):
            write_atomic(manifest_path, json.dumps(manifest))  # flushes the folder, and so the checkpoint's name too
            if self.copies:
                store(self.url).put(f"{self.url}/{name}.json", manifest_path, patience=self.patience)

    def store_file(self, path: Path) -> dict[str, Any]:
        """Store a file that was written below `scratch`, and return its size and checksum."""
        manifest = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        self._verify(path, _flat(self.url, self.scratch, path), manifest)
        return manifest

    def _verify(self, part: Path, url: str, manifest: dict[str, Any]) -> None:
        """Upload the file if the checkpoints are in a store, and read it back. Raises OSError when it differs."""
        if self.copies:
            store(url).put(url, part, patience=self.patience)
            [blob] = store(url).list(url, patience=self.patience) or [Blob(url, 0)]
            same = blob.size == manifest["bytes"] and sha256_of(pieces(blob, self.patience)) == manifest["sha256"]
        else:
            flush(part)
            same = agrees(part, manifest)
        if not same:
            raise OSError(f"{url}: what was read back differs from what was written")

    def _drop(self, newest: str) -> None:
        """Delete old checkpoints. `newest` and those before it stay, `keep` in all, and also the newest one of step
        `best` and of each step for which `stays` is true.

        A checkpoint of a later step is deleted too, as it must be damaged: the run would have continued from it. A
        checkpoint of a later epoch belongs to another writer and stays."""
        self.guard()
        blobs = blobs_of(self.url, self.patience)
        older = [n for n in names_in(blobs) if order(n) < order(newest)]
        staying = [n for n in reversed(older) if step_of(n) == self.best or self.stays(step_of(n))]
        names = {newest, *older[: self.keep - 1], *{step_of(n): n for n in staying}.values()}  # newest of each step
        for url in sorted(blobs):  # sorted, as a manifest (.json) is deleted before its checkpoint (.pt)
            if stem(url) not in names and epoch_of(stem(url)) <= self.epoch:
                _delete(url)
        if self.copies:
            _delete_others(self.scratch, newest)

    def _cause(self, e: Exception) -> Exception:
        """Return Superseded if another process, which may have deleted files, has taken the run over; otherwise `e`."""
        if isinstance(e, OSError | UserError):
            try:
                self.guard()
            except (OSError, UserError, Outage) as found:
                return found if isinstance(found, Superseded) else e
        return e

    def _named(self, e: Exception) -> Exception:
        """Return an I/O error, UserError or Outage as one line that names the folder or URL; other errors unchanged."""
        if not isinstance(e, OSError | UserError | Outage) or isinstance(e, Superseded):
            return e
        line = f"{self.scratch}: {e.strerror}" if isinstance(e, OSError) and e.strerror else str(e)
        line = line if self.url in line else f"{self.url}: cannot be written: {line}"
        return Outage(line) if isinstance(e, Outage) else UserError(line)

    def _warn(self, line: str, *, exc_info: bool = False) -> None:
        kind = re.sub(r"\d+", "", line)  # warnings that differ only in a step or count are logged once
        if kind not in self._warned:
            log.warning("%s", line, exc_info=exc_info)
        self._warned.add(kind)


def blobs_of(url: str | Path, patience: float = PATIENCE) -> dict[str, Blob]:
    """Return the files of all checkpoints by URL. Raises UserError and Outage when the store cannot be read."""
    url = _url(url)
    if folder := folder_of(url):
        # Sizes are left at 0, as another process may delete a file before its size is read.
        return {str(p): Blob(str(p), 0) for p in folder.glob("step-*")}
    return {b.url: b for b in store(url).list(f"{url}/", "step-", patience=patience)}


def delete_after(url: str | Path, step: int) -> None:
    """Delete the checkpoints of steps after `step`."""
    for file in sorted(blobs_of(url)):  # sorted, as a manifest (.json) is deleted before its checkpoint (.pt)
        if step_of(stem(file)) > step:
            _delete(file)


class CheckpointListing(NamedTuple):
    """The files of all checkpoints, which rank 0 lists for all ranks."""

    blobs: dict[str, Blob]  # all files by URL
    manifests: dict[str, bytes]  # contents of the newest checkpoints' manifests by URL; empty for a local folder


def listing(url: str | Path, patience: float = PATIENCE) -> CheckpointListing:
    """Return the files of all checkpoints. Raises UserError and Outage when the store cannot be read."""
    url, blobs = _url(url), blobs_of(url, patience)
    manifests: dict[str, bytes] = {}
    for path in [] if folder_of(url) else [f"{url}/{name}.json" for name in names_in(blobs)[:NEWEST]]:
        with contextlib.suppress(MissingFile):  # deleted since it was listed
            manifests[path] = b"".join(pieces(blobs[path], patience))
    return CheckpointListing(blobs, manifests)


def newest(
    url: str | Path,
    scratch: Path | None = None,
    *,
    patience: float = PATIENCE,
    whole: bool = True,
    listed: CheckpointListing | None = None,
    step: int | None = None,
) -> dict[str, Any] | None:
    """Return the state of the newest intact checkpoint or, with `step`, of the newest one of this step; None if there
    is none. Damaged ones are skipped with a warning.

    With `whole`, sharded tensors have values, see `read`. `listed` is a result of `listing`, perhaps of another rank.
    From a store, one process on each machine downloads the checkpoint into `scratch`, unless it is there already.
    Raises UserError and Outage when the store cannot be read."""
    url = _url(url)
    listed = listed or CheckpointListing(blobs_of(url, patience), {})
    for name in names_in(listed.blobs):
        if step is not None and step_of(name) != step:
            continue
        for _ in range(TRIES):
            if not (path := _local_file(name, url, listed, _scratch(url, scratch), patience)):
                break
            with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
                return read(path, whole=whole)
        log.warning("checkpoint %s/%s.pt is damaged and was skipped", url, name)
    return None


def read(path: Path, *, whole: bool = True) -> dict[str, Any]:
    """Return the state in the file of a checkpoint.

    Ranks write the rows of sharded tensors to separate files. With `whole`, these are read too. Without it, sharded
    tensors have a shape but no values, and the key `shards` names the folder of these files."""
    from eagleray.engine import sharded_checkpoint

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as e:  # torch has many errors for files that are not its own or hold more than tensors
        raise UserError(f"{path}: not a checkpoint written by eagleray ({type(e).__name__})") from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: not a checkpoint written by eagleray, but a {type(state).__name__}")
    folder = path.with_suffix(".shards")
    return sharded_checkpoint.fill(state, folder) if whole else state | {"shards": str(folder)}


def manifests(url: str | Path) -> list[str]:
    """Return the names of the checkpoints with a manifest, newest first.

    Raises UserError and Outage when the store cannot be read."""
    return names_in(blobs_of(url))


def intact(path: Path) -> bool:
    """Return whether a checkpoint in a folder has the size and checksum of its manifest."""
    told = path.with_suffix(".json")
    try:
        manifest = parse_manifest(told.read_bytes()) if told.is_file() else None
    except OSError:
        return False
    return manifest is not None and _all_agree(_files(path, manifest))


def _url(url: str | Path) -> str:
    return str(url).rstrip("/")


def _scratch(url: str, scratch: Path | None) -> Path:
    """Return the folder into which files are written first: that of the checkpoints if it is local, else `scratch`."""
    if folder := folder_of(url):
        return folder  # within it, a complete file need only be renamed
    assert scratch is not None, f"{url}: needs a scratch folder"
    return scratch


def _flat(url: str, scratch: Path, path: Path) -> str:
    """Return the URL under which a file below `scratch` is stored: a name with dots in place of subfolders."""
    return f"{url}/{'.'.join(path.relative_to(scratch).parts)}"


def _files(path: Path, manifest: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """Return the local files of a checkpoint with their sizes and checksums."""
    folder = path.with_suffix(".shards")
    return {path: manifest} | {folder / name: told for name, told in manifest.get("shards", {}).items()}


def _all_agree(files: dict[Path, dict[str, Any]]) -> bool:
    return all(agrees(path, manifest) for path, manifest in files.items())


def _delete(url: str) -> None:
    """Delete a file, or the local folder with the rows of a sharded checkpoint."""
    if (folder := folder_of(url)) and folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        store(url).delete(url)


def _local_file(name: str, url: str, listed: CheckpointListing, scratch: Path, patience: float) -> Path | None:
    """Return the local file of a checkpoint, downloaded if it is in a store; None when it is damaged or gone."""
    path = scratch / f"{name}.pt"
    if scratch == folder_of(url):
        return path if intact(path) else None
    try:
        blobs, path_there = listed.blobs, f"{url}/{name}.json"
        text = listed.manifests.get(path_there) or b"".join(pieces(blobs[path_there], patience))
        manifest = parse_manifest(text)
        if manifest is None or blobs[f"{url}/{name}.pt"].size != manifest["bytes"]:
            return None
        files = _files(path, manifest)
        if _all_agree(files):
            return path
        scratch.mkdir(parents=True, exist_ok=True)
        with file_lock(scratch / ".lock"):
            there = all(
                agrees(part, told) or _fetch(blobs[_flat(url, scratch, part)], part, told, patience)
                for part, told in files.items()
            )
        return path if there else None
    except (MissingFile, KeyError):
        return None


def _fetch(blob: Blob, path: Path, manifest: dict[str, Any], patience: float) -> bool:
    """Download a file of a checkpoint, and return whether it is intact. If so, delete other checkpoints beside it."""
    intact = fetch(blob, path, manifest, patience)
    if intact:
        _delete_others(path.parent, path.stem)
    return intact


def _delete_others(folder: Path, name: str) -> None:
    """Delete all checkpoints in a folder except the one of this name."""
    for path in folder.glob("step-*"):
        if path.name.partition(".")[0] != name:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
