"""Copy a run in a store to a folder of this machine, for programs that read files."""

import shutil
from collections.abc import Collection
from pathlib import Path

from eagleray.base import files
from eagleray.base.errors import UserError
from eagleray.runs import layout, layout_of_sweep
from eagleray.runs.background import Background
from eagleray.runs.histories import GROWING, History, histories
from eagleray.storage import store

RECORDS = {layout.RECIPE, layout.ENVIRONMENT, layout.SUMMARY, layout.HEALTH_PLOT, layout.MLFLOW}
RECORDS |= {layout.PLACES, layout.START_SCORES, layout.EVALUATION}  # files that rank 0 writes as a whole
NOTES = {layout.RESULTS, layout.FORECAST, layout.CHOICE, *layout_of_sweep.FILES}  # files that commands write themselves
OVERLAP = 4096  # bytes of a growing file that are fetched again, to see that it is the same file
LOCK = ".fetch"  # the file that a process locks while it downloads into a folder
PATIENCE = 600.0  # seconds to wait for another process that downloads


class Copy(Background):
    """A folder on this machine with the records and histories of a run, and the files in one of its folders.

    As a context it is kept up to date."""

    def __init__(self, out: str, folder: Path, inside: str = layout.EXPORT, *, may_be_ahead: bool = False) -> None:
        """A copy that `may_be_ahead` is the folder that rank 0 writes: what the store does not have yet stays."""
        super().__init__("copy-of-run")
        assert store.folder_of(out) is None, f"{out}: would be deleted as a copy of itself"
        self.out, self.folder, self.inside, self.may_be_ahead = out, folder, inside, may_be_ahead
        self.tags: dict[str, object] = {}
        self.histories: dict[str, History] = {}  # this is the last listing
        self.has_run = False  # a rank had written something into the store then

    def __enter__(self) -> "Copy":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.tick()

    def tick(self) -> None:
        """Download the files that have changed, and delete those that the store no longer has.

        One process of this machine does so at a time. Raises UserError, Busy when another one takes longer than
        PATIENCE, and Outage."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with files.lock_folder(self.folder, LOCK, patience=PATIENCE):
            try:
                self._fetch()
            except UserError:  # a file has been replaced since it was listed, or else the error comes again
                self._fetch()

    fetch = tick

    def _fetch(self) -> None:
        here, inside = (list(store.store(self.out).list(f"{self.out}/{f}")) for f in ("", f"{self.inside}/"))
        self.histories = histories(here)
        records = [b for b in here if b.url.rpartition("/")[2] in RECORDS | NOTES]
        self.has_run = bool(self.histories or store.store(self.out).list(f"{self.out}/{layout.CHECKPOINTS}/", "step-"))
        if not self.may_be_ahead:
            names = {*self.histories, *(b.url.rpartition("/")[2] for b in records)}
            forget(self.folder, names, folders=not (names or self.has_run))
        for name, history in self.histories.items():
            if self.tags.get(name) != history.tag:
                self._fetch_history(history, self._path(name))
                self.tags[name] = history.tag
        for blob in inside + records:
            if self.tags.get(blob.url) == blob.tag:
                continue
            try:
                data = store.store(blob.url).get(blob.url)
            except FileNotFoundError:
                continue
            self._replace(self._path(blob.url.removeprefix(f"{self.out}/")), data)
            self.tags[blob.url] = blob.tag

    def _fetch_history(self, history: History, path: Path) -> None:
        """Append what the copy lacks, so that its readers can go on; a copy of another file is replaced."""
        size = path.stat().st_size if path.exists() else 0
        start = max(size - OVERLAP, 0)
        if 0 < size <= history.size:
            data = history.read(start)
            with path.open("rb+") as file:
                file.seek(start)
                if file.read() == data[: size - start]:
                    file.write(data[size - start :])
                    return
        self._replace(path, history.read())

    def _replace(self, path: Path, data: bytes) -> None:
        if not (self.may_be_ahead and path.exists() and path.read_bytes().startswith(data)):
            files.write_atomic(path, data)

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def forget(folder: Path, kept: Collection[str] = (), *, folders: bool = True) -> None:
    """Delete the files of a run but those of some names, and its folders: a copy of a run that its store no longer has
    would become part of the next one there."""
    for name in (RECORDS | GROWING | NOTES).difference(kept):
        (folder / name).unlink(missing_ok=True)
    for name in (layout.EXPORT, layout.CHECKPOINTS, layout.TENSORBOARD, layout.WANDB, layout.PROFILE, layout.PICTURES):
        if folders:
            shutil.rmtree(folder / name, ignore_errors=True)
