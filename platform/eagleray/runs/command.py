"""Hold a run for one command of a user: nothing is written into its folder before, and a second command is refused."""

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from eagleray.base import files
from eagleray.base.errors import Busy, Outage, UserError
from eagleray.runs import layout, lease, remote
from eagleray.runs.lease import Lease
from eagleray.runs.remote import Background
from eagleray.storage.store import is_remote

SOON = 3.0  # seconds in which a command of this machine that was killed lets go of its run
TRIALS = "trials.jsonl"  # of a sweep: a row for each trial
PATIENCE = 60.0  # seconds to wait for the last process of a killed run, and for a file server that noticed no death


def new_command() -> str:
    """Return an id for a command, which differs from that of any other one on any machine."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def holds_run(out: str) -> bool:
    """Return whether a run has begun in a folder or at a URL. Raises UserError and Outage."""
    return all(remote.read_note(out, name) is not None for name in (layout.RECIPE, layout.ENVIRONMENT))


def _check_no_sweep(out: str) -> None:
    """Raises UserError when a sweep has begun in `out`, and no run."""
    if remote.read_note(out, TRIALS) is not None and not holds_run(out):
        raise UserError(f"out={out}: holds a sweep; give another out=")


@contextlib.contextmanager
def hold(out: str, command: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """A context in which no other command works on the run in `out`, nor does a process of an earlier one.

    `say` gets a line before a wait. Raises Busy when another command is at work, and UserError when the run cannot be
    written or holds a sweep; nothing was written then."""
    with contextlib.ExitStack() as stack:
        try:
            (_hold_remote if is_remote(out) else _hold_folder)(stack, out, command, say)
        except Busy:
            raise
        except (OSError, UserError, Outage) as e:
            why = (e.strerror if isinstance(e, OSError) else "") or str(e)
            raise UserError(why if why.startswith("out=") else f"out={out}: cannot be written: {why}") from None
        yield


def _hold_folder(stack: contextlib.ExitStack, out: str, command: str, say: Callable[[str], None]) -> None:
    folder = Path(out)
    new = not folder.exists()
    files.make_folder(folder)
    _check_no_sweep(out)
    stack.enter_context(_lock_command(folder, command, say))
    if new:
        stack.callback(_remove_unused, folder)
    try:
        files.lock_folder(folder, patience=SOON).close()
    except Busy:
        say(f"{out}: waiting for the last process of this run to end, {PATIENCE:.0f} s at most")
        files.lock_folder(folder, patience=PATIENCE).close()


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused before anything was written."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {layout.COMMAND, files.LOCK}:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()


def _lock_command(folder: Path, command: str, say: Callable[[str], None]) -> contextlib.AbstractContextManager[object]:
    try:
        return files.lock_folder(folder, layout.COMMAND, patience=SOON, note=f" ({command})")
    except Busy as e:
        if f" on {socket.gethostname()} " in str(e):  # no file server that has yet to notice a death
            raise Busy(f"{e}: another command is training this run") from None
        say(f"{e}: waiting {PATIENCE:.0f} s at most")
        return files.lock_folder(folder, layout.COMMAND, patience=PATIENCE, note=f" ({command})")


def _hold_remote(stack: contextlib.ExitStack, out: str, command: str, say: Callable[[str], None]) -> None:
    _check_no_sweep(out)
    for name in (layout.COMMAND, layout.OWNER):
        found = lease.holder(out, name)
        if found and found.alive:
            say(f"a process was working on {out} seconds ago: waiting until it is silent for {lease.DEAD:.0f} s")
            break
    ours = Lease(out, layout.COMMAND, command)
    ours.claim()
    stack.callback(ours.release)
    heartbeat = Heartbeat(ours)
    heartbeat.start()
    stack.callback(heartbeat.close)
    _wait_for_rank(out)


def _wait_for_rank(out: str) -> None:
    """Wait until no rank of an earlier command gives signs of life. Raises Busy when one does."""
    first, end = lease.holder(out, layout.OWNER), time.monotonic() + lease.DEAD
    while (found := lease.holder(out, layout.OWNER)) and found.alive and time.monotonic() < end:
        if first and found.record != first.record:
            raise Busy(f"out={out}: another command is training this run, on {found.record.get('host')}")
        time.sleep(1)


class Heartbeat(Background):
    """A thread that gives signs of life for a lease until it is closed."""

    def __init__(self, lease: Lease) -> None:
        super().__init__("heartbeat")
        self.lease, self.renewed = lease, time.monotonic()

    def tick(self) -> None:
        if time.monotonic() > self.renewed + lease.BEAT:
            self.lease.renew()
            self.renewed = time.monotonic()
