"""Find the run that a command names in place of a recipe, by its folder or URL, to continue or use it.

Stores are imported late, as they import NumPy, which showing a recipe does not need."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from eagleray.base.contexts import replaced
from eagleray.base.errors import UserError
from eagleray.base.files import read_history, write_atomic
from eagleray.config import bundled, plugins, yaml_text
from eagleray.runs import layout
from eagleray.runs.summary import EARLY, finished


class NamedRun(NamedTuple):
    """A run that has begun, as `named_run` finds it."""

    out: str  # absolute path or URL
    file: Path  # its recipe, on this machine

    def plugins(self) -> Path:
        """Return a folder of this machine with the sources of the run's plug-ins, directly or in a subfolder."""
        from eagleray.storage.folder_copy import local_folder
        from eagleray.storage.store import what_is

        url = f"{self.out}/{plugins.FOLDER}"  # missing if all plug-ins are of installed packages
        return local_folder(url) if "://" in url and what_is(url) else self.file.parent


_looked: dict[str, NamedRun | None] | None = None  # runs that were looked up, by name; None outside of `one_look`


def one_look() -> AbstractContextManager[None]:
    """A context in which `named_run` looks up each name only once, however often a command asks for it."""
    return replaced(sys.modules[__name__], "_looked", {})


def named_run(name: str) -> NamedRun | None:
    """Return the run in a folder, at a URL or at the URL of its recipe.yaml, else None. A shipped recipe has priority
    over a folder of its name. Raises UserError if a recipe is there but no run, Outage if a store does not answer."""
    known = {} if _looked is None else _looked
    if name not in known:
        known[name] = _find(name)
    return known[name]


def _find(name: str) -> NamedRun | None:
    if "://" not in name and (not (Path(name) / layout.RECIPE).is_file() or name in bundled.recipes()):
        return None
    from eagleray.runs.run_store import run_store
    from eagleray.storage.store import absolute

    out = absolute(name.rstrip("/").removesuffix(f"/{layout.RECIPE}"))
    run = run_store(out)
    if (text := run.get(layout.RECIPE)) is None:
        return None
    if run.get(layout.ENVIRONMENT) is None and not run.list(layout.STARTS):
        raise UserError(f"{name}: no run has begun there, though it has a {layout.RECIPE}, which begins one as a file")
    file = run.view / layout.RECIPE
    if "://" in out:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    return NamedRun(out, file)


def check_goes_on(name: str, overrides: Sequence[str]) -> None:
    """Raises UserError when the run that a command names has finished, unless max_steps or out is overridden."""
    moves = any(key.partition("=")[0].strip() in ("max_steps", "out") for key in overrides)
    run = None if moves else named_run(name)
    if run is None:
        return
    from eagleray.runs.run_store import run_store

    lines = read_history((folder := run_store(run.out).fetch()) / layout.METRICS)
    done = finished(folder, lines[-1]["step"] if lines else 0)
    if done and done.get(EARLY):
        raise UserError(f"{name}: the run ended early, after {done['steps']} steps; expected another out")
    if done and yaml_text.parse(run.file.read_text()).get("max_steps") in (None, done["steps"]):
        raise UserError(f"{name}: the run has finished, with {done['steps']} steps; a larger max_steps continues it")
