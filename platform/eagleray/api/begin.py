"""Begin a run: check its recipe and data, and write the files with which it starts.

This imports PyTorch, which takes half a gigabyte of memory. On a cluster a child process does it and ends, because the
command then waits for the run's workers, and shares the head node's memory with the commands of all other runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from eagleray import config
from eagleray.base import child
from eagleray.base.console import out as console
from eagleray.base.console import say
from eagleray.cluster.ray_map import scanner
from eagleray.config import plugins
from eagleray.runs import layout
from eagleray.runs.background import side_work
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.runs.summary import finished

if TYPE_CHECKING:
    from eagleray.runs.plan import Plan


class Begun(NamedTuple):
    """The facts about a checked run that a command needs to wait for its end."""

    steps: int  # planned number of steps of the whole run
    batch: int  # images per step
    done: bool  # whether the run has already taken all its steps


def begin(recipe: Recipe, command: Sequence[str], *, insist: bool) -> Begun:
    """Check the run of a recipe whose paths are absolute and, unless it is done, write the files with which it starts.
    `command` is the user's command line; `insist` is as in `pretrain`. Raises UserError and Outage."""
    from eagleray.runs.begin import begin_run, checked_plan

    plan = checked_plan(recipe, scanner())
    done = finished(run_store(recipe.out).view, plan.steps) is not None
    if not done:
        begin_run(plan, command, insist=insist)
        note_choice(plan)
    return Begun(plan.steps, plan.stream.batch, done)


def begin_apart(recipe: Recipe, command: Sequence[str], *, insist: bool) -> Begun:
    """Do the same as `begin` in a child process, whose end frees the memory of its imports. Raises the errors of
    `begin`, and RuntimeError when the process dies."""
    given = config.to_plain(recipe), plugins.pack(recipe.plugins), list(command), insist, console.quiet
    return child.call("eagleray.api.begin:begin_sent", *given)  # type: ignore[no-any-return]


def begin_sent(
    tree: dict[str, Any], packed: Mapping[str, plugins.Sources], command: Sequence[str], insist: bool, quiet: bool
) -> Begun:
    """Do the same as `begin`, for a recipe sent as a tree and the sources of its plug-ins."""
    console.quiet = quiet
    plugins.install(packed)
    return begin(config.check(Recipe, tree, "recipe"), command, insist=insist)


def note_choice(plan: "Plan") -> None:
    """If the run's recipe selects samples, store for the report which samples the run reads."""
    run, selection = run_store(plan.recipe.out), plan.stream.selection
    if selection is None or json.loads(run.get(layout.CHOICE) or "{}").get("digest") == selection.digest:
        return
    from eagleray.reports.draw_choice import choice_of_plan

    with side_work("warning: the report will not show the choice of samples", say):
        run.put(layout.CHOICE, json.dumps(asdict(choice_of_plan(plan))))
