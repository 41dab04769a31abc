"""Hold the folder of a sweep for one command, and keep a copy of its files in a store if `out` is a URL."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eagleray.base import files
from eagleray.base.console import out as console
from eagleray.base.errors import Outage, UserError
from eagleray.runs import layout, lease, remote
from eagleray.runs.command import TRIALS, new_command
from eagleray.storage import store
from eagleray.storage.store import is_remote

log = logging.getLogger(__name__)
SWEEP, ROWS, REPORTS, TABLE, BEST = "sweep.yaml", TRIALS, "reports.jsonl", "trials.csv", "best.yaml"
PLOTS = ("keys.png", "parallel.png", "curves.png")
STORED = (SWEEP, ROWS, REPORTS, TABLE, BEST, *PLOTS, layout.ENVIRONMENT, layout.MLFLOW)


class SweepMirror(remote.Mirror):
    """Uploads the files of a sweep, and renews the sign that a command is working on it."""

    def __init__(self, out: str) -> None:
        super().__init__(out, new_command())

    def fetch(self) -> None:
        """Replace the files on this machine by those in the store, as the last command may have run elsewhere."""
        download(self.out, self.folder)

    def paths(self) -> list[Path]:
        """Return the files of a sweep, its own file first, which says that there is one."""
        return [self.folder / name for name in STORED]

    def upload(self) -> None:
        """Upload the files that have changed, now and not at the next tick. A failure is a warning, as the next tick
        tries again."""
        try:
            self.copy()
        except (UserError, Outage, OSError) as e:
            log.warning("%s", e)


def download(out: str, folder: Path) -> None:
    """Make the files of a sweep in a folder the same as in the store. Raises UserError and Outage."""
    stored = {b.url.rpartition("/")[2]: b.url for b in store.store(out).list(out + "/")}
    for name in STORED:
        path = folder / name
        if name in stored:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(path, store.store(out).get(stored[name]))
        else:
            path.unlink(missing_ok=True)


def sweep_folder(out: str) -> Path | None:
    """Return the folder of the sweep in `out`, which for a URL is a copy on this machine; None if `out` holds no
    sweep. Raises UserError and Outage."""
    if is_remote(out):
        if remote.read_note(out, SWEEP) is None:
            return None
        download(out, remote.view_dir(out))
    folder = remote.view_dir(out)
    return folder if (folder / SWEEP).exists() else None


@contextmanager
def open_sweep_dir(out: str) -> Iterator[Callable[[], None]]:
    """A context in which no other command works on the sweep in `out`. It yields a function that uploads the files
    that have changed. Raises UserError when another command is working on it."""
    folder = remote.work_dir(out)
    with files.writing(f"out={out}"):
        folder.mkdir(parents=True, exist_ok=True)
    with files.lock_folder(folder):
        if not is_remote(out):
            yield lambda: None
            return
        if remote.is_running(out):
            console.print(
                f"a command was working on {out} seconds ago: this one begins when it has been silent for "
                f"{lease.DEAD:.0f} s",
                markup=False,
            )
        mirror = SweepMirror(out)
        try:
            yield mirror.upload
        finally:
            mirror.close()
