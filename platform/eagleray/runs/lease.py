"""Hold a run in a store for one process: a lease whose epoch grows with every claim.

Whoever claims it creates the file `<name>-<epoch>`, which a store lets one process do, and writes it again and again as
a sign of life. It is lost when there is a file of a later epoch, whatever clocks say. How old a sign of life is, the
store's own clock tells.
"""

import contextlib
import json
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from eagleray.base.errors import Busy, Outage, Superseded, UserError
from eagleray.storage import store

BEAT = 10.0  # seconds between two signs of life
DEAD = 35.0  # seconds without one after which a lease counts as given up
SETTLE = 1.0  # seconds after which a claim is read back, as not every store lets one process alone create a file


@dataclass(frozen=True)
class Holder:
    """The newest claim of a lease, as it is in the store."""

    epoch: int
    record: dict[str, Any]
    age: float  # seconds since its last sign of life

    @property
    def alive(self) -> bool:
        """Return whether it was neither released nor left without a sign of life."""
        return not self.record.get("released") and self.age < DEAD

    def is_of(self, command: str) -> bool:
        """Return whether a process of this command made the claim."""
        return bool(self.record.get("command") == command)


def holder(out: str, name: str) -> Holder | None:
    """Return the newest claim of a run's lease, or None. Raises UserError and Outage."""
    while epochs := _epochs(out, name):
        epoch = max(epochs)
        try:
            text, age = store.store(out).look(epochs[epoch])
        except FileNotFoundError:  # a later claim has deleted it since
            time.sleep(0.1)
            continue
        with contextlib.suppress(ValueError):
            record = json.loads(text)
            return Holder(epoch, record if isinstance(record, dict) else {}, age)
        return Holder(epoch, {}, age)
    return None


class Lease:
    """A claim to one of a run's leases, such as that of the rank that writes."""

    def __init__(self, out: str, name: str, command: str) -> None:
        """`command` is the id of the user's command; processes of one command take a lease from each other."""
        self.out, self.name, self.command = out, name, command
        self.id, self.epoch, self.beats = secrets.token_hex(8), 0, 0

    def claim(self, after: int = 0) -> None:
        """Take the lease with an epoch above `after` and above all that were. Raises Busy when a process of another
        command holds it."""
        began, first = time.monotonic(), None
        while True:
            found = holder(self.out, self.name)
            if found and found.alive and not found.is_of(self.command) and time.monotonic() < began + DEAD:
                first = first or found
                if (found.epoch, found.record) != (first.epoch, first.record):  # it gives signs of life
                    raise Busy(f"out={self.out}: another command is training this run, on {found.record.get('host')}")
                time.sleep(1)
                continue
            self.epoch = max(found.epoch if found else 0, after) + 1
            if self._store().create(self._url(self.epoch), self._record()):
                time.sleep(SETTLE)
                found = holder(self.out, self.name)
                if found and found.record.get("id") == self.id:
                    break
        for epoch, url in _epochs(self.out, self.name).items():
            if epoch < self.epoch:
                self._store().delete(url)

    def check(self) -> None:
        """Raises Superseded when another process has taken the lease since, and Outage when the store does not say."""
        found = holder(self.out, self.name)
        if found and (found.epoch > self.epoch or (found.epoch == self.epoch and found.record.get("id") != self.id)):
            host = found.record.get("host")
            raise Superseded(f"out={self.out}: another process has taken this run over, on {host}; this one ends")

    def renew(self) -> None:
        """Give a sign of life. Raises Superseded, Outage and OSError."""
        self.check()
        self.beats += 1
        self._store().write(self._url(self.epoch), self._record())

    def release(self) -> None:
        """Let others claim the lease at once. Its epoch stays, so that theirs is higher."""
        with contextlib.suppress(UserError, Outage, OSError):  # they wait until it counts as given up
            self.check()
            self._store().write(self._url(self.epoch), self._record(released=True))

    def _store(self) -> store.Store:
        return store.store(self.out)

    def _url(self, epoch: int) -> str:
        return f"{self.out}/{self.name}-{epoch:06d}"

    def _record(self, **more: Any) -> bytes:
        record = {"command": self.command, "id": self.id, "host": socket.gethostname(), "beat": self.beats}
        return json.dumps(record | more).encode()


def _epochs(out: str, name: str) -> dict[int, str]:
    """Return the URLs of a lease's claims by their epochs; 0 is that of a run by an older version."""
    epochs = {}
    for blob in store.store(out).list(f"{out}/", name):
        if match := re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", blob.url.rpartition("/")[2]):
            epochs[int(match[1] or 0)] = blob.url
    return epochs
