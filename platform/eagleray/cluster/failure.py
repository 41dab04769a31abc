"""Store why a run can no longer be mended by a restart: in the run's folder or, if it cannot be written, in Ray."""

import json
import logging
import os
import traceback
from typing import Any

from eagleray.base.errors import Outage, UserError, one_line
from eagleray.runs import layout
from eagleray.runs.run_store import run_store

log = logging.getLogger(__name__)
TIMES = 3  # errors in a row that ended an attempt, without a new checkpoint, after which the run has failed
COUNT = ".failures"  # name of the file that counts such errors


def fail(out: str, command: str, failure: dict[str, Any]) -> None:
    """Store why no restart can mend a command's run, unless a reason is stored already: others fail because the first
    has. The command's id is stored with it, so that a later command does not take the failure for its own."""
    from ray.experimental import internal_kv

    if failure_of(out, command):
        return
    text = json.dumps(failure | {"command": command})
    try:
        run_store(out).put(layout.FAILURE, text)
    except (UserError, Outage, OSError) as e:
        if not internal_kv._internal_kv_initialized():
            raise
        log.warning("%s of %s cannot be written: %s", layout.FAILURE, out, e)
        internal_kv._internal_kv_put(_key(out, command), text.encode())


def failure_of(out: str, command: str) -> dict[str, Any] | None:
    """Return the stored reason why no restart can mend a command's run, or None if there is none."""
    from ray.experimental import internal_kv

    try:
        text = run_store(out).get(layout.FAILURE)
    except (UserError, Outage, OSError):
        text = None
    known = json.loads(text or "{}")
    if known.get("command") == command:
        return dict(known)
    kept = internal_kv._internal_kv_get(_key(out, command)) if internal_kv._internal_kv_initialized() else None
    return dict(json.loads(kept)) if kept else None


def report(error: Exception) -> dict[str, Any]:
    """Return the record of this rank's error that is stored if the error ends the run."""
    rank = os.environ.get("RANK", "0")  # the process group may not have been formed
    trace = f"rank {rank} failed\n{''.join(traceback.format_exception(error))}"
    return {"user": False, "why": f"{type(error).__name__}: {one_line(error)}", "trace": trace}


def count(out: str, command: str) -> int:
    """Count an error that has ended an attempt. Returns the number of such errors in a row: the count begins anew with
    a new checkpoint and with another command."""
    from eagleray.engine import checkpoint  # imports PyTorch, which the waiting command avoids

    newest = checkpoint.manifests(f"{out}/checkpoints")[:1]
    known = json.loads(run_store(out).get(COUNT) or "{}")
    times = int(known["times"]) + 1 if known.get("after") == newest and known.get("command") == command else 1
    run_store(out).put(COUNT, json.dumps({"command": command, "after": newest, "times": times}))
    return times


def _key(out: str, command: str) -> bytes:
    """Return the key of a run's failure in Ray, with the run's path, as a sweep's trials have one command."""
    return f"eagleray-failure-{command}-{out}".encode()
