"""Keeps why no restart can mend a command's run: in the run's folder, or in Ray where the folder cannot be written."""

import json
import logging
from typing import Any

from eagleray.base.errors import Outage, UserError
from eagleray.runs import layout, remote

log = logging.getLogger(__name__)


def fail(out: str, command: str, failure: dict[str, Any]) -> None:
    """Write down why no restart can mend a command's run. The id keeps it from being another command's failure."""
    from ray.experimental import internal_kv

    text = json.dumps(failure | {"command": command})
    try:
        remote.write_note(out, layout.FAILURE, text)
    except (UserError, Outage, OSError) as e:
        if not internal_kv._internal_kv_initialized():
            raise
        log.warning("%s of %s cannot be written: %s", layout.FAILURE, out, e)
        internal_kv._internal_kv_put(_key(command), text.encode())


def failure_of(out: str, command: str) -> dict[str, Any] | None:
    """Return why no restart can mend a command's run, or None."""
    from ray.experimental import internal_kv

    try:
        text = remote.read_note(out, layout.FAILURE)
    except (UserError, Outage, OSError):
        text = None
    known = json.loads(text or "{}")
    if known.get("command") == command:
        return dict(known)
    kept = internal_kv._internal_kv_get(_key(command)) if internal_kv._internal_kv_initialized() else None
    return dict(json.loads(kept)) if kept else None


def _key(command: str) -> bytes:
    return f"eagleray-failure-{command}".encode()
