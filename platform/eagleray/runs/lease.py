"""Claim a run in a store for one process by a lease, whose epoch grows with every claim.

A process claims the lease by creating the file `<name>-<epoch>`, which a store lets only one process do. It rewrites
the file regularly as a sign of life, whose age is measured by the store's clock. The lease is lost when a file of a
later epoch exists, whatever clocks say. A listing may be out of date: a listed claim that is gone was deleted by a
later one, and a claim that is not listed yet lets the attempt to create the same file fail."""

import contextlib
import json
import math
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagleray.base.errors import Busy, Outage, Superseded, UserError
from eagleray.runs.background import Background
from eagleray.storage import store

BEAT = 10.0  # seconds between two signs of life
DEAD = 35.0  # seconds without a sign of life after which a lease counts as given up
SETTLE = 1.0  # seconds after which a claim is read back, as some stores let two processes create one file
TRIES = 20  # number of failed claims after which a process gives up; others were faster, or the store refused
AGAIN = 3  # most listings of claims; a listing is repeated if all its claims were deleted before they were read


@dataclass(frozen=True)
class Holder:
    """The newest claim of a lease, as it is in the store."""

    epoch: int
    record: dict[str, Any]
    age: float  # seconds since its last sign of life

    @property
    def alive(self) -> bool:
        """Return whether the claim was not released, and gave a sign of life within DEAD seconds."""
        return not self.record.get("released") and self.age < DEAD


def holder(out: str, name: str, known: int = 0) -> Holder | None:
    """Return the newest claim of a run's lease, or None. `known` is the epoch of a claim that may exist without being
    listed, or 0. Raises UserError when the store refuses, and Outage when it does not answer."""
    for _ in range(AGAIN):
        epochs = {known, *_epochs(out, name)} - {0}
        for epoch in sorted(epochs, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                return Holder(max(epochs), *_look(out, name, epoch))
        if not epochs:
            return None
        time.sleep(0.1)  # a later claim has deleted the listed ones
    return Holder(max(epochs), {}, math.inf)


def wait_until_silent(out: str, name: str, say: Callable[[str], None], command: str = "", known: int = 0) -> int:
    """Wait, at most DEAD seconds, until no process of another command holds a lease, and return the last epoch or 0.

    `say` gets a line before the wait. Raises Busy when the holder gives a sign of life meanwhile."""
    first, end = None, time.monotonic() + DEAD
    while (found := holder(out, name, known)) and found.alive and found.record.get("command") != command:
        if first is None:
            first = found
            say(f"a process was working on {out} seconds ago: waiting until it is silent for {DEAD:.0f} s")
        if (found.epoch, found.record) != (first.epoch, first.record):
            raise Busy(f"out={out}: another command is training this run, on {found.record.get('host')}")
        if time.monotonic() > end:
            break
        time.sleep(1)
    return found.epoch if found else 0


class Lease(Background):
    """A claim to one of a run's leases, such as that of the rank that writes. Its thread gives the signs of life."""

    def __init__(self, out: str, name: str, command: str) -> None:
        """`command` is the id of the user's command. A process may take over a lease from another of its command."""
        super().__init__("lease")
        self.out, self.held_as, self.command = out, name, command
        self.at_end: Callable[[], object] = lambda: None  # called when the lease has been closed
        self.id, self.epoch, self.beats = secrets.token_hex(8), 0, 0
        self.lost = False  # whether another process has taken the lease
        self.renewed = time.monotonic()

    def claim(self, after: int = 0, say: Callable[[str], None] = lambda line: None) -> None:
        """Take the lease with an epoch above `after` and above all earlier ones.

        Raises Busy when a process of another command holds it, and Outage when the store accepts no claim."""
        known = after
        for attempt in range(TRIES):
            known = max(wait_until_silent(self.out, self.held_as, say, self.command, known), known) + 1
            if store.store(self.out).create(_url(self.out, self.held_as, known), self._record()):
                time.sleep(SETTLE)
                if self._is_mine(known):
                    break
            time.sleep(0.05 * attempt)
        else:
            raise Outage(f"out={self.out}: {TRIES} claims of the run in a row were not accepted by its store")
        self.epoch, self.renewed = known, time.monotonic()
        for epoch in _epochs(self.out, self.held_as):
            if epoch < self.epoch:
                store.store(self.out).delete(_url(self.out, self.held_as, epoch))

    def check(self) -> None:
        """Raises Superseded when another process has taken the lease, and Outage when the store does not answer."""
        later = max(_epochs(self.out, self.held_as), default=0)
        if later <= self.epoch and self._is_mine(self.epoch):
            return
        self.lost = True
        found = holder(self.out, self.held_as)
        host = f", on {found.record['host']}" if found and "host" in found.record else ""
        what = f"another process has taken this run over{host}" if later else "its files in the store were deleted"
        raise Superseded(f"out={self.out}: {what}; this one ends")

    def tick(self) -> None:
        if not self.lost and time.monotonic() > self.renewed + BEAT:
            self.renew()

    def renew(self) -> None:
        """Give a sign of life. Raises Superseded when the lease is lost, Outage and OSError when the store fails."""
        self.check()
        self.beats += 1
        store.put_bytes(_url(self.out, self.held_as, self.epoch), self._record())
        self.renewed = time.monotonic()

    def close(self) -> None:
        """Release the lease, so that others can claim it at once. Its file stays, so that the next epoch is higher."""
        super().close()
        with contextlib.suppress(UserError, Outage, OSError):  # if this fails, others have to wait for DEAD seconds
            self.check()
            store.put_bytes(_url(self.out, self.held_as, self.epoch), self._record(released=True))
        self.at_end()

    def _is_mine(self, epoch: int) -> bool:
        """Return whether this process has made the claim of an epoch. It is False if the claim's file was deleted."""
        try:
            return bool(_look(self.out, self.held_as, epoch)[0].get("id") == self.id)
        except FileNotFoundError:
            return False

    def _record(self, **more: Any) -> bytes:
        record = {"command": self.command, "id": self.id, "host": socket.gethostname(), "beat": self.beats}
        return json.dumps(record | more).encode()


def _look(out: str, name: str, epoch: int) -> tuple[dict[str, Any], float]:
    """Return the record of a claim and its age in seconds. A damaged claim has an empty record."""
    text, age = store.store(out).look(_url(out, name, epoch))
    with contextlib.suppress(ValueError):
        record = json.loads(text)
        return (record if isinstance(record, dict) else {}), age
    return {}, age


def _epochs(out: str, name: str) -> list[int]:
    """Return the epochs of a lease's claims that the store lists."""
    names = [blob.url.rpartition("/")[2] for blob in store.store(out).list(f"{out}/", f"{name}-")]
    return [int(found[1]) for found in (re.fullmatch(rf"{re.escape(name)}-(\d+)", n) for n in names) if found]


def _url(out: str, name: str, epoch: int) -> str:
    return f"{out}/{name}-{epoch:06d}"
