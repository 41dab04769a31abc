"""Keep the files of a run in a folder or in a bucket, with the same methods for both.

A command reads the run from the folder `view`, and rank 0 writes it into the folder `work`. For a run in a folder, both
are that folder. For a run in a bucket, they are two local copies in this machine's cache: two, because rank 0 and a
command may run on the same machine. What rank 0 writes is then uploaded (see `bucket_files`)."""

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eagleray.base import files
from eagleray.base.errors import Busy, Outage, explained
from eagleray.runs import layout
from eagleray.storage import store
from eagleray.storage.blob import Blob

if TYPE_CHECKING:
    from eagleray.runs.bucket_files import Mirror
    from eagleray.runs.lease import Lease

Say = Callable[[str], None]
SOON = 3.0  # seconds in which a killed process of this machine releases its run
PATIENCE = 60.0  # seconds to wait until a killed run's last process ends, or NFS notices that its machine is dead


class FolderClaim:
    """The claim of one process to a run in a folder, by a locked file in that folder."""

    lost = False  # whether another process has taken the run over, which a locked file prevents

    def __init__(self, lock: contextlib.AbstractContextManager[object], epoch: int, new: Path | None) -> None:
        """`new` is the run's folder if this claim has made it, else None."""
        self.lock, self.epoch, self.new = lock, epoch, new

    def check(self) -> None:
        """Do nothing, as no other process can take over a locked folder. A lease raises Superseded here."""

    def close(self) -> None:
        """Release the lock, and delete the folder of a run that was refused before anything was written."""
        with contextlib.suppress(OSError):
            if self.new and {path.name for path in self.new.iterdir()} <= {layout.COMMAND, layout.OWNER}:
                for path in self.new.iterdir():
                    path.unlink()
                self.new.rmdir()
        self.lock.__exit__(None, None, None)


class RunStore:
    """The files of a run in a folder. Methods raise UserError if a store refuses, and Outage if it does not answer.

    A file's `name` is its path in the run's folder, such as `recipe.yaml` or `pictures/knn.png`."""

    out: str  # the folder or URL
    view: Path  # the folder on this machine that commands read
    work: Path  # the folder on this machine that rank 0 writes

    def __init__(self, out: str, folder: Path) -> None:
        self.out, self.view, self.work = out, folder, folder

    def get(self, name: str) -> str | None:
        """Return the text of a file, or None when there is none. Raises UserError when it is not text."""
        url = f"{self.out}/{name}"
        with explained(f"{url}: is no text", UnicodeDecodeError):
            return None if (data := store.find(url)) is None else data.decode()

    def put(self, name: str, text: str | bytes) -> None:
        """Write a small file for other processes of the run. Raises OSError when it cannot be written."""
        store.put_bytes(f"{self.out}/{name}", text.encode() if isinstance(text, str) else text)

    def share(self, path: Path) -> None:
        """Upload a file below `view` or `work` if the run is at a URL, else do nothing. Raises OSError if it fails."""

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        store.store(self.out).delete(f"{self.out}/{name}")

    def list(self, start: str = "") -> list[Blob]:
        """Return the files directly in the run's folder whose names begin with `start`."""
        return store.store(self.out).list(f"{self.out}/", start) if self.view.is_dir() else []

    def append(self, name: str, text: str) -> None:
        """Append text to a growing file, such as metrics.jsonl, of a run whose ranks have ended."""
        with (self.view / name).open("a") as file:
            file.write(text)

    def fetch(self, inside: str = layout.EXPORT, *, work: bool = False) -> Path:
        """Download new records, histories and files of the subfolder `inside` into the folder `view` or, if `work` is
        true, into the folder `work`, and return its path. A run in a folder needs no copy."""
        return self.view

    def following(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which `view` is kept up to date."""
        return contextlib.nullcontext()

    def check_writable(self) -> None:
        """Create the run's folder. Raises UserError when nothing can be written to it."""
        with explained(f"out={self.out}: cannot be written", OSError, Outage):
            self.view.mkdir(parents=True, exist_ok=True)
            self.put(".probe", " " * 4096)  # a full disk has room for an empty file
            self.delete(".probe")

    def lock(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a context for a process that reads a file and writes it again.
        A bucket has no locks, so if two processes do this at once, the change of one is lost."""
        return files.file_lock(self.view / f".{name}.lock")

    def claim(
        self, name: str, command: str, say: Say, *, after: int = 0, patience: float = PATIENCE
    ) -> "FolderClaim | Lease":
        """Claim the run for a command (`name` is layout.COMMAND) or for its writing rank (layout.OWNER). `say` gets a
        line before a wait. The claim's epoch is `after` or, in a bucket, above it.

        Raises Busy when another command holds the run, and Outage when a process of this command on this machine does
        not release it within `patience` seconds."""
        new = not self.work.exists()
        files.make_folder(self.work)
        try:
            lock = self._lock(name, f" ({command})", say, patience)
        except Busy as e:
            if name == layout.COMMAND:
                raise
            # This command holds the run, so the lock belongs to one of its own ranks, which hangs. This is an Outage,
            # as the file system may yet notice that the rank's machine is dead.
            raise Outage(f"{e}, which another process of this run has to lock") from None
        return FolderClaim(lock, after, self.work if new else None)

    def _lock(self, name: str, note: str, say: Say, patience: float) -> contextlib.AbstractContextManager[object]:
        try:
            return files.lock_folder(self.work, name, patience=SOON, note=note)
        except Busy as e:
            if name == layout.COMMAND and f" on {socket.gethostname()} " in str(e):
                raise Busy(f"{e}: another command is training this run") from None
            say(f"{e}: waiting {patience:.0f} s at most")  # NFS may notice late that the locking machine is dead
            return files.lock_folder(self.work, name, patience=patience, note=note)

    def wait_until_free(self, name: str, say: Say) -> None:
        """Wait until no process holds the claim `name` of the run. Raises Busy when a process goes on holding it."""
        with self._lock(name, "", say, PATIENCE):
            pass

    def is_claimed(self, name: str = layout.OWNER) -> bool:
        """Return whether a process holds the claim `name` of the run, as far as this machine can tell."""
        return files.is_locked(self.view / name)

    def flush(self) -> None:
        """Flush the histories in `work` to the disk. Raises OSError when this fails."""
        for path in self.work.glob("*.jsonl"):
            files.sync_file(path)
        files.sync_folder(self.work)

    def mirror(self, claim: "FolderClaim | Lease") -> "Mirror | None":
        """Download the files of earlier starts into `work`, and return a Mirror that uploads what rank 0 writes there.
        For a run in a folder there is nothing to copy, and this returns None."""
        return None


def run_store(out: str | Path) -> RunStore:
    """Return the files of the run in a folder or at a URL."""
    folder = store.folder_of(str(out))
    if folder is not None:
        return RunStore(str(out), folder)
    from eagleray.runs.bucket_files import BucketRun

    return BucketRun(str(out))
