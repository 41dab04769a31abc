"""Hold the folder of a sweep for one command, and keep a copy of its files in a store if `out` is a URL."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eagleray.base import files
from eagleray.base.console import say
from eagleray.base.errors import Outage, UserError
from eagleray.runs import layout
from eagleray.runs.command import new_command
from eagleray.runs.layout_of_sweep import FILES, SWEEP
from eagleray.runs.run_store import run_store

log = logging.getLogger(__name__)
STORED = (*FILES, layout.ENVIRONMENT, layout.MLFLOW)


def sweep_folder(out: str) -> Path | None:
    """Return the folder of the sweep in `out`, which for a URL is a copy on this machine; None if `out` holds no
    sweep. Raises UserError and Outage."""
    run = run_store(out)
    return run.fetch() if run.get(SWEEP) is not None else None


@contextmanager
def open_sweep_dir(out: str) -> Iterator[Callable[[], None]]:
    """A context in which no other command works on the sweep in `out`. It yields a function that uploads the files
    that have changed. Raises UserError when another command is working on it."""
    run, sent = run_store(out), dict[str, tuple[int, int]]()
    with files.writing(f"out={out}"):
        claim = run.claim(layout.COMMAND, new_command(), say)

    def upload() -> None:
        """Store what has changed; what cannot be stored is tried again at the next call."""
        try:
            claim.check()
            for name in STORED:
                if (path := run.work / name).exists() and sent.get(name) != (now := _state(path)):
                    run.share(path)
                    sent[name] = now
        except (UserError, Outage, OSError) as e:
            log.warning("%s", e)

    try:
        run.fetch(work=True)
        yield upload
        upload()
    finally:
        claim.close()


def _state(path: Path) -> tuple[int, int]:
    return (stat := path.stat()).st_mtime_ns, stat.st_size
