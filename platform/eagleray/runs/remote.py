"""Store a run at an s3:// URL: copy its files between the store and the working folder of each machine."""

import json
import logging
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagleray.base import files
from eagleray.base.errors import Outage, UserError
from eagleray.runs import layout
from eagleray.storage import store
from eagleray.storage.blob import Blob
from eagleray.storage.store import is_remote

log = logging.getLogger(__name__)
SECONDS = 3.0  # between two checks for changes
BEAT = 10.0  # seconds between two signs of life
DEAD = 35.0  # seconds without one after which a run counts as ended
HISTORIES = {layout.RECIPE, layout.ENVIRONMENT, layout.SUMMARY, layout.HEALTH_PLOT, layout.LOG, layout.MLFLOW}
HISTORIES |= {f"{name}.jsonl" for name in ("metrics", "health", "quarantine", "skipped", "starts")}


def work_dir(out: str) -> Path:
    """Return the folder on this machine that a rank writes to. For a remote run it is in the cache."""
    return _cache_dir(out, "work") if is_remote(out) else Path(out)


def view_dir(out: str) -> Path:
    """Return the folder on this machine that a command reads from. For a remote run it is not the working folder, as
    a rank of the run may be on this machine too."""
    return _cache_dir(out, "view") if is_remote(out) else Path(out)


def _cache_dir(out: str, kind: str) -> Path:
    return files.cache_folder("runs") / f"{out.rstrip('/').rpartition('/')[2]}-{zlib.crc32(out.encode()):08x}" / kind


def write_note(out: str, name: str, text: str) -> None:
    """Write a small file into the run folder, for other processes of the run."""
    store.put_bytes(f"{out}/{name}", text.encode())


def read_note(out: str, name: str) -> str | None:
    url = f"{out}/{name}"
    try:
        return store.store(url).get(url).decode()
    except FileNotFoundError:
        return None


def delete_note(out: str, name: str) -> None:
    url = f"{out}/{name}"
    store.store(url).delete(url)


def check_writable(out: str) -> None:
    """Create the run folder. Raises UserError when nothing can be written to it."""
    try:
        view_dir(out).mkdir(parents=True, exist_ok=True)
        write_note(out, ".probe", "")
        delete_note(out, ".probe")
    except OSError as e:
        raise UserError(f"out={out}: cannot be written: {e.strerror or e}") from None
    except Outage as e:
        raise UserError(f"out={out}: cannot be written: {e}") from None


def list_files(out: str, inside: str = "export") -> Iterator[Blob]:
    """Yield the history and result files of a remote run, and the files in one of its folders, `inside`."""
    for folder in (out, f"{out}/{inside}"):
        for blob in store.store(out).list(folder + "/"):
            name = blob.url.removeprefix(f"{out}/")
            if name in HISTORIES or name == layout.RESULTS or name.startswith(f"{inside}/"):
                yield blob


def is_running(out: str) -> bool:
    """Return whether a process is working on the run, as far as this machine can tell."""
    if is_remote(out):
        owner = json.loads(read_note(out, layout.OWNER) or "{}")
        return bool(time.time() - owner.get("time", 0) < DEAD)
    return files.is_folder_locked(Path(out))


class Copy:
    """A folder on this machine with a copy of a remote run."""

    def __init__(self, out: str, folder: Path, inside: str = "export") -> None:
        """The copy holds the history files of the run and those in one of its folders, `inside`."""
        self.out, self.folder, self.inside = out, folder, inside
        self.tags: dict[str, str] = {}

    def fetch(self) -> None:
        """Download the files that have changed.

        A file that is longer on this machine is not replaced: rank 0 of the run is on this machine, and the store is
        behind it. Raises UserError and Outage.
        """
        for blob in list_files(self.out, self.inside) if is_remote(self.out) else ():
            if self.tags.get(blob.url) == blob.tag:
                continue
            try:
                data = store.store(blob.url).get(blob.url)
            except FileNotFoundError:
                continue
            path = self.folder / blob.url.removeprefix(f"{self.out}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            here = path.read_bytes() if path.exists() else b""
            if data.startswith(here):  # it has grown: append, so that readers of the file can go on
                with path.open("ab") as f:
                    f.write(data[len(here) :])
            elif not here.startswith(data):
                files.write_atomic(path, data)
            self.tags[blob.url] = blob.tag


class Background(threading.Thread):
    """A thread that calls `tick` every few seconds until it is closed; each failure is logged once."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.ended = threading.Event()
        self.reported = ""

    def tick(self) -> None:
        """Do the work once; every subclass defines it."""
        raise NotImplementedError

    def run(self) -> None:
        while not self.ended.wait(SECONDS):
            try:
                self.tick()
            except (UserError, Outage, OSError) as e:
                if str(e) != self.reported:
                    log.warning("%s", e)
                self.reported = str(e)

    def close(self) -> None:
        self.ended.set()
        self.join()


class Follower(Background):
    """A context that keeps a local copy of a remote run up to date."""

    def __init__(self, out: str) -> None:
        super().__init__("follow-remote")
        self.out, self.copy = out, Copy(out, view_dir(out))

    def tick(self) -> None:
        self.copy.fetch()

    def __enter__(self) -> "Follower":
        if is_remote(self.out):
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive():
            self.close()
            self.copy.fetch()


class StopSignal(Background):
    """Watches whether the run was asked to stop."""

    def __init__(self, out: str) -> None:
        super().__init__("stop-signal")
        self.out, self.requested = out, False
        if is_remote(out):
            self.start()

    def tick(self) -> None:
        self.requested = self.requested or read_note(self.out, layout.STOP) is not None

    def asked(self) -> bool:
        return self.requested if is_remote(self.out) else (Path(self.out) / layout.STOP).exists()

    def close(self) -> None:
        if self.is_alive():
            super().close()


class Mirror(Background):
    """Uploads rank 0's working folder to a remote run, and renews the sign that the run is alive.

    Raises UserError when a rank of another command is working on the run.
    """

    def __init__(self, out: str, command: str) -> None:
        super().__init__("mirror")
        self.out, self.folder, self.command = out, work_dir(out), command
        self.sent: dict[Path, tuple[int, int]] = {}
        self.lock = threading.Lock()
        self.renewed = 0.0
        self._claim()
        Copy(out, self.folder).fetch()
        self.start()

    def _claim(self) -> None:
        """Mark the run as alive and ours. Raises UserError when another command holds it."""
        began = time.monotonic()
        while (owner := self._owner()) and owner["command"] != self.command and time.time() - owner["time"] < DEAD:
            if time.monotonic() > began + 2 * DEAD:
                raise UserError(f"out={self.out}: another command is training this run, on {owner['host']}")
            time.sleep(1)
        self.renew()

    def _owner(self) -> dict[str, Any] | None:
        text = read_note(self.out, layout.OWNER)
        return json.loads(text) if text else None  # type: ignore[no-any-return]

    def renew(self) -> None:
        """Renew the sign that the run is alive."""
        sign = {"command": self.command, "time": time.time(), "host": socket.gethostname()}
        write_note(self.out, layout.OWNER, json.dumps(sign))
        self.renewed = time.monotonic()

    def tick(self) -> None:
        if time.monotonic() > self.renewed + BEAT:
            self.renew()
        self.copy()

    def copy(self) -> None:
        """Upload the files that have changed. Raises UserError, Outage and OSError."""
        with self.lock:
            for path in [self.folder / n for n in sorted(HISTORIES)] + sorted(self.folder.glob("export/[!.]*")):
                if not path.exists():
                    continue
                stat = path.stat()
                if self.sent.get(path) != (stat.st_mtime_ns, stat.st_size):
                    data = path.read_bytes()  # as it is now: it may grow meanwhile
                    store.put_bytes(f"{self.out}/{path.relative_to(self.folder)}", data)
                    self.sent[path] = (stat.st_mtime_ns, stat.st_size)

    def close(self) -> None:
        super().close()
        try:
            self.copy()
            delete_note(self.out, layout.OWNER)
        except (UserError, Outage, OSError) as e:
            log.warning("not all files of %s could be uploaded: %s; the same command uploads the rest", self.folder, e)
