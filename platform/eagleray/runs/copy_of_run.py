"""Copy a run in a store to a folder of this machine, for programs that read files."""

import shutil
from pathlib import Path

from eagleray.base import files
from eagleray.base.errors import UserError
from eagleray.runs import layout, layout_of_sweep
from eagleray.runs.background import Background
from eagleray.runs.histories import GROWING, History, histories
from eagleray.storage import store

RECORDS = {layout.RECIPE, layout.ENVIRONMENT, layout.SUMMARY, layout.HEALTH_PLOT, layout.MLFLOW}
RECORDS |= {layout.PLACES, layout.START_SCORES}  # files that rank 0 writes as a whole
NOTES = {layout.RESULTS, layout.FORECAST, layout.CHOICE, *layout_of_sweep.FILES}  # files that commands write themselves
OVERLAP = 4096  # bytes of a growing file that are fetched again, to see that it is the same file
LOCK = ".fetch"  # the file that a process locks while it downloads into a folder


class Copy(Background):
    """A folder on this machine with the records and histories of a run, and the files in one of its folders. As a
    context it is kept up to date."""

    def __init__(self, out: str, folder: Path, inside: str = layout.EXPORT) -> None:
        super().__init__("copy-of-run")
        self.out, self.folder, self.inside = out, folder, inside
        self.tags: dict[str, object] = {}
        self.histories: dict[str, History] = {}  # as they were listed last
        self.begun = self.ran = False  # whether the store had anything of the run then, and of its ranks

    def tick(self) -> None:
        self.fetch()

    def __enter__(self) -> "Copy":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.fetch()

    def fetch(self) -> None:
        """Download the files that have changed, by one process of this machine at a time.

        A file that is longer on this machine is not replaced:
        rank 0 of the run is on this machine, and the store is behind it. Raises UserError and Outage."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with files.file_lock(self.folder / LOCK):
            try:
                self._fetch()
            except UserError:  # a file has been replaced since it was listed, or else the error comes again
                self._fetch()

    def _fetch(self) -> None:
        here, inside = (list(store.store(self.out).list(f"{self.out}/{f}")) for f in ("", f"{self.inside}/"))
        self.histories = histories(here)
        records = [b for b in here if b.url.rpartition("/")[2] in RECORDS | NOTES]
        self.ran = bool(self.histories or store.store(self.out).list(f"{self.out}/{layout.CHECKPOINTS}/", "step-"))
        self.begun = bool(self.ran or records)
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
            _replace(self._path(blob.url.removeprefix(f"{self.out}/")), data)
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
        _replace(path, history.read())

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def forget(folder: Path) -> None:
    """Delete a copy of a run that its store no longer has, or another run would go on with it."""
    for name in RECORDS | GROWING | NOTES:
        (folder / name).unlink(missing_ok=True)
    for name in (layout.EXPORT, layout.CHECKPOINTS, layout.TENSORBOARD, layout.WANDB, layout.PROFILE, layout.PICTURES):
        shutil.rmtree(folder / name, ignore_errors=True)


def _replace(path: Path, data: bytes) -> None:
    """Write a whole file, unless the copy here is ahead of it."""
    if not path.exists() or not path.read_bytes().startswith(data):
        files.write_atomic(path, data)
