"""Store why a run has failed for good: in the run's folder or, if that cannot be written, in Ray's key-value store."""

import json
import logging
import os
import traceback
from typing import Any

from eagleray.base.errors import Outage, UserError, one_line
from eagleray.runs import layout
from eagleray.runs.run_store import run_store

log = logging.getLogger(__name__)
TIMES = 3  # a run fails for good when errors end this many attempts in a row without a new checkpoint
COUNT = ".failures"  # name of the file with the number of attempts in a row that errors have ended


def fail(out: str, command: str, failure: dict[str, Any]) -> None:
    """Store why a command's run has failed for good. The first stored reason stays, as later errors follow from it. The
    command's id is stored too, so that a later command does not take the failure for its own."""
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
    """Return the stored reason why a command's run has failed for good, or None if there is none."""
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
    """Return a record of an error of this rank, to be stored if the error ends the run."""
    rank = os.environ.get("RANK", "0")  # there may be no process group yet that knows it
    trace = f"rank {rank} failed\n{''.join(traceback.format_exception(error))}"
    return {"user": False, "why": f"{type(error).__name__}: {one_line(error)}", "trace": trace}


def count(out: str, command: str) -> int:
    """Count an error that has ended an attempt, and return the number of such errors in a row. After a new checkpoint
    and for another command, the count begins again at 1."""
    from eagleray.engine import checkpoint  # imported here, as it imports PyTorch; the command does not

    newest = checkpoint.manifests(f"{out}/checkpoints")[:1]
    known = json.loads(run_store(out).get(COUNT) or "{}")
    times = int(known["times"]) + 1 if known.get("after") == newest and known.get("command") == command else 1
    run_store(out).put(COUNT, json.dumps({"command": command, "after": newest, "times": times}))
    return times


def _key(out: str, command: str) -> bytes:
    """Return the key of a run's failure in Ray's store. All trials of a sweep share `command`, so it contains `out`."""
    return f"eagleray-failure-{command}-{out}".encode()
