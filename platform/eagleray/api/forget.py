"""Forget images: take a run back to before it used them, so that it continues as if it had never read them."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.api.run import Run
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.base.files import read_history, writing
from eagleray.config import plugins as loading
from eagleray.engine.checkpoint_files import names_in, stem, step_of
from eagleray.runs import layout
from eagleray.runs import recipe as recipes
from eagleray.runs.attempts import read_starts
from eagleray.runs.command import hold, new_command
from eagleray.runs.forgotten import lines_of, read_forgotten, samples_of, unread_samples, write_forgotten
from eagleray.runs.run_store import run_store
from eagleray.runs.tracking import Tracking, begin_anew
from eagleray.storage.store import absolute, store

if TYPE_CHECKING:
    from eagleray.runs.plan import Plan
    from eagleray.runs.recipe import Recipe

log = logging.getLogger(__name__)
# The files and folders of a run to delete, as they may show the images, or depend on the steps that are taken back.
SHOWING = (layout.NEIGHBOURS, layout.CHOICE, layout.PICTURES, "report.html")
FILES = (layout.SUMMARY, layout.EVALUATION, *SHOWING, layout.HEALTH_PLOT, layout.PLACES, layout.EXPORT)


def forget(
    run: str | Path | Run,
    samples: str | Path | None = None,
    *,
    where: str = "",
    dry_run: bool = False,
    plugins: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Let a run that has finished or was stopped forget images: the continued run ends with the same bits as a run that
    has never read them.

    `samples` is a Parquet or CSV file like `data.train.exclude`, with a column `key` and maybe `shard`; `where` is an
    expression like `data.train.where`. Give one of the two. The run goes back to the newest checkpoint before the first
    step that used one of the images: `forget` deletes later checkpoints, all exports, the summary and pictures, and
    cuts the histories. From then on a neighbour replaces each image, as for a broken image. With `dry_run=True` nothing
    changes. After an interruption, repeat the call. `plugins` lists files and modules to load, such as the run's own.

    Returns a dictionary: the number of `images` found, how many the run had `forgotten` before, the keys `not_found`,
    the steps that the run had taken (`taken`), the first step that used one of the images (`used`, None if there is
    none), the step of the checkpoint to continue from (`step`) and the names of the later `checkpoints`.

    Raises UserError if another command is training the run, or if its data cannot be read or have changed.

    Example:

        found = eagleray.forget("runs/a", where="key = '000000_plain_circle'", dry_run=True)
        found["images"], found["used"], found["step"]
    """
    if bool(samples) == bool(where):
        raise UserError("expected one of --samples FILE and --where EXPRESSION")
    loading.use(plugins)
    out, command = Run(run).out, new_command()
    with hold(out, command, say):
        opened = Run(out)
        recipe = replace(recipes.load(str(opened.folder / layout.RECIPE), named=True), out=out)
        from eagleray.data.columns import samples_listed
        from eagleray.engine import checkpoint
        from eagleray.runs.plan import opened_again

        with opened_again(recipe) as plan:
            check_unchanged(plan, opened)
            listed, not_found = samples_listed(plan.index, absolute(str(samples)) if samples else "", where)
            new = samples_of(plan.index, lines_of(plan.index, listed, 0)) - plan.index.forgotten
            blobs = checkpoint.blobs_of(f"{out}/{layout.CHECKPOINTS}")
            taken = steps_taken(opened, names_in(blobs))
            before = steps_before(plan, opened, new, taken)
            state = None
            if before is not None:
                kept = checkpoint.CheckpointListing({u: b for u, b in blobs.items() if step_of(stem(u)) <= before}, {})
                scratch = run_store(out).work / layout.CHECKPOINTS
                state = checkpoint.newest(f"{out}/{layout.CHECKPOINTS}", scratch, listed=kept)
            step = taken if before is None else state["step"] if state else 0
            lines = [*read_forgotten(out), *lines_of(plan.index, new, step)]
        if not dry_run:
            with writing(f"out={out}"):
                if before is not None:
                    go_back(recipe, command, before, step, state["lengths"] if state else {})
                elif new:
                    delete(out, SHOWING)  # images that no step has used may be shown as left out or as neighbours
                write_forgotten(out, lines)
    return {
        "images": len(new.union(listed)),
        "forgotten": len(set(listed) - new),
        "not_found": not_found,
        "taken": taken,
        "used": None if before is None else before + 1,
        "step": step,
        "checkpoints": [name for name in names_in(blobs) if before is not None and step_of(name) > before],
    }


def check_unchanged(plan: "Plan", run: Run) -> None:
    """Raises UserError when the data or their order have changed since the last start of a run, as the steps that used
    an image cannot be computed then."""
    from eagleray.runs.checks import CHANGED

    [*_, last] = [plan.origin, *(line for line in read_starts(run.folder / layout.STARTS) if "order" in line)]
    for name, what in CHANGED.items():
        if last[name] != plan.origin[name]:
            raise UserError(f"{run.out}: {what} that the run has read; put back what was there")


def steps_taken(run: Run, checkpoints: Sequence[str]) -> int:
    """Return the highest step in the histories and the checkpoints of a run; 0 without any."""
    lines = (line for name in (layout.METRICS, layout.STEPS) for line in read_history(run.folder / name))
    return max([0, *(line["step"] for line in lines), *map(step_of, checkpoints)])


def steps_before(plan: "Plan", run: Run, samples: frozenset[int], taken: int) -> int | None:
    """Return the number of steps before the first one that used one of these samples; None if no step did, and -1 if
    the run has measured images before its first step, as a run with `start` does."""
    from eagleray.data.sample_uses import first_step_with

    if plan.recipe.start and samples:
        return -1
    bad = unread_samples(plan.index, run.folder) - samples
    return first_step_with(plan.stream, samples, taken, bad) if samples else None


def go_back(recipe: "Recipe", command: str, before: int, step: int, lengths: Mapping[str, int]) -> None:
    """Delete a run's results of steps after `before`, and cut its histories back to `step`, when they had `lengths`
    lines. After an interruption, call it again: the histories, which tell how far the run was, are cut last."""
    from eagleray.engine import checkpoint
    from eagleray.runs.run_dir import RunDir

    with RunDir(recipe, 0, Tracking("none"), command=command) as folder:
        checkpoint.delete_after(folder.checkpoints, before)
        delete(recipe.out, FILES)
        if (note := folder.path / layout.MLFLOW).exists():
            begin_anew(note)
            folder.store.share(note)
        folder.cut(step, lengths)
        log.info("forgets images: goes back to step %d", step)
        folder.writer.first()  # stores the histories now, as an error while closing is only logged


def delete(out: str, names: Sequence[str]) -> None:
    """Delete files and folders of a run, also their copies on this machine."""
    for name in names:
        for path in {run_store(out).work / name, run_store(out).view / name}:  # reports show the pictures in `view`
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        for url in [f"{out}/{name}"] if Path(name).suffix else [b.url for b in store(out).walk(f"{out}/{name}/")]:
            store(out).delete(url)
