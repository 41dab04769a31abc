"""Begin a run for the command that has claimed it: check everything that may fail, then write the run's first files.

The quick checks come before those of the data, whose indexing may take long."""

import json
from collections.abc import Sequence

from eagleray import config
from eagleray.base.console import out as console
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.files import writing
from eagleray.data.index import ScanAll, open_shown
from eagleray.engine import world
from eagleray.runs import layout
from eagleray.runs.checks import check_device, differences, make_plan
from eagleray.runs.command import environment, write_plugins
from eagleray.runs.local_forecast import check_fit
from eagleray.runs.plan import Plan
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.runs.sources import check_exists, has_begun, weight_files
from eagleray.runs.start import build_started, check_progress


def checked_plan(recipe: Recipe, scan_all: ScanAll) -> Plan:
    """Return the plan of a run, after checking its folder, this machine, its recipe and its data. `scan_all` reads tars
    that have no index. Raises UserError when a check fails, and Outage when a store does not answer."""
    run = run_store(recipe.out)
    run.check_writable()
    folder = run.fetch()
    begun, stored = has_begun(folder), folder / layout.RECIPE
    if begun and stored.exists() and (differ := differences(recipe, config.load(Recipe, stored))):
        raise UserError(
            f"out={recipe.out}: holds another run: {differ}; give another out=, or continue that run with "
            f"`eagleray pretrain {recipe.out}`"
        )
    if not recipe.is_elsewhere:
        check_device(recipe, world.device_of(recipe.gpus))
    for key, place in weight_files(recipe).items() if not begun else ():
        check_exists(place, key)
    return make_plan(recipe, note=say, scan_all=scan_all, opening=open_shown)


def begin_run(plan: Plan, command: Sequence[str], *, insist: bool = False) -> None:
    """Check that a run fits into memory, unless the user `insist`s, and that its start weights fit. Then write its
    recipe, plug-ins and environment. `command` is the user's command line. Raises UserError when a check fails."""
    recipe, run = plan.recipe, run_store(plan.recipe.out)
    check_fit(plan, say, insist=insist)
    if (recipe.start or recipe.backbone.weights or recipe.teacher) and not has_begun(run.view):
        started = build_started(recipe, len(plan.index))
        check_progress(plan, started)
        for note in started.notes:
            run.put(note.file, "\n".join(note.lines) + "\n")
            text = "\n".join(note.said) + f": {recipe.out}/{note.file}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            if note.warning:
                say(f"warning: {note.warning}")
    with writing(f"out={recipe.out}"):
        run.put(layout.RECIPE, config.dump(recipe))
        write_plugins(recipe.out, recipe.plugins)
        run.put(layout.ENVIRONMENT, json.dumps(environment() | {"command": list(command)}, indent=1))
        for left in [*run.list(layout.STOP), *run.list(layout.FAILURE)]:
            run.delete(left.url.rpartition("/")[2])
