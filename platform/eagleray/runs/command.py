"""Claim a run for one command of a user, so that a second command is refused before it writes anything."""

import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import eagleray
from eagleray.base import child
from eagleray.base.errors import Busy, Outage, UserError, hide_secrets
from eagleray.base.user import user
from eagleray.config import plugins
from eagleray.runs import layout
from eagleray.runs.run_store import RunStore, run_store
from eagleray.storage import store


def new_command() -> str:
    """Return a new id for a command, which no other command on any machine has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def holds_run(run: RunStore) -> bool:
    """Return whether a run has begun: its recipe and environment exist. Raises UserError or Outage if a read fails."""
    return all(run.get(name) is not None for name in (layout.RECIPE, layout.ENVIRONMENT))


@contextlib.contextmanager
def hold(out: str, command: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """A context in which neither another command nor a process of an earlier command works on the run in `out`.

    `say` gets a line before a wait. Raises Busy when another command is at work, and UserError when the run cannot be
    written or holds a sweep. In both cases nothing was written."""
    run = run_store(out)
    with contextlib.ExitStack() as stack:
        try:
            if run.get(layout.SWEEP_ROWS) is not None and not holds_run(run):
                raise UserError(f"out={out}: holds a sweep; give another out=")
            stack.callback(run.claim(layout.COMMAND, command, say).close)
            run.wait_until_free(layout.OWNER, say)
        except Busy:
            raise
        except (OSError, UserError, Outage) as e:
            why = (e.strerror if isinstance(e, OSError) else "") or str(e)
            raise UserError(why if why.startswith("out=") else f"out={out}: cannot be written: {why}") from None
        yield


def read_environment(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's environment.json, or an empty mapping if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / layout.ENVIRONMENT).read_text()))
    return {}


def environment() -> dict[str, Any]:
    """Return the contents of environment.json: versions of packages, machine, user and command."""
    from eagleray.base import devices  # imported late, as it imports PyTorch, which not every command needs

    names = ("eagleray", "torch", "torchvision", "timm", "numpy", "pillow", "ray", "mlflow", "webdataset", "boto3")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": devices.names()}
    return {
        "python": platform.python_version(),
        "packages": versions,
        "commit": commit(),
        **machine,
        "user": user(),
        "command": [hide_secrets(word) for word in sys.argv],
    }


def commit() -> str:
    """Return the hash of the last git commit that changed this package, or an empty string outside a checkout."""
    with contextlib.suppress(OSError):  # git may be missing
        words = ["git", "-C", str(Path(eagleray.__file__).parent), "log", "-1", "--format=%H", "--", "."]
        return str(child.run(words, text=True).stdout).strip()
    return ""


def write_plugins(out: str, used: Iterable[plugins.Plugin]) -> None:
    """Write the sources of plug-ins into the folder of a run or a sweep, beside its recipe."""
    for sources in plugins.pack(used).values():
        for relative, data in sources.items():
            store.put_bytes(f"{out}/{plugins.FOLDER}/{relative}", data)
