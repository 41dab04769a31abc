"""Read and save the checkpoints of a run: the state of everything that a step changes."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base import dist, shards
from eagleray.base.errors import UserError
from eagleray.engine import checkpoint, sharded, sharded_checkpoint
from eagleray.engine.optim import lay_out_moments
from eagleray.runs import evaluations
from eagleray.runs import recipe as recipes
from eagleray.runs.rank_run import RankRun, Stateful
from eagleray.runs.run_dir import RunDir

log = logging.getLogger(__name__)
GROUPED = "a new run takes over its weights with start='{from: OUT, what: method}'"


def newest_checkpoint(folder: RunDir) -> dict[str, Any] | None:
    """Return the newest checkpoint of the run, or None. Called by all ranks together. Raises UserError when it was made
    with another recipe than this one."""
    recipe, out = folder.recipe, folder.out
    url, patience = f"{out}/checkpoints", 60 * recipe.data.patience
    listed = dist.from_rank_zero(partial(checkpoint.listing, url, patience))
    whole = recipe.parallel == "ddp" or dist.size() == 1
    state = checkpoint.newest(url, folder.scratch, patience=patience, whole=whole, listed=listed)
    if len(set(dist.gather_objects(state and state["step"]))) > 1:
        raise RuntimeError("ranks read different checkpoints")  # a disk fails; a restart may mend it
    if state and state["digest"] != recipes.digest(recipe):
        raise UserError(f"{out}: its checkpoints were made with another recipe")
    return state


def load_checkpoint(state: dict[str, Any] | None, stateful: Stateful, first: int = 0) -> dict[str, Any]:
    """Load a checkpoint into the objects and return it. Without a checkpoint return the `first` step and the seconds
    of a run that has not begun. Raises UserError when its optimiser has other groups of parameters."""
    if state is None:
        return {"step": first, "seconds": 0.0, "useful": 0.0}
    groups = state["optimizer"]["param_groups"], stateful.optimizer.param_groups
    saved, own = ([len(group["params"]) for group in side] for side in groups)
    if saved != own:
        found = f"the checkpoint of step {state['step']} groups the parameters otherwise ({saved}, not {own})"
        raise UserError(f"{found}; {GROUPED}")
    parts = stateful._asdict()
    if shards.sharded(next(stateful.method.parameters())):
        read = partial(sharded_checkpoint.read_rows, Path(state.get("shards", "")))
        sharded.load(parts.pop("method"), parts.pop("optimizer"), state, read)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    if not shards.sharded(next(stateful.method.parameters())):
        lay_out_moments(stateful.optimizer)
    return state


def save_checkpoint(run: RankRun, step: int) -> None:
    """Save a checkpoint in the background. Only rank 0 saves, as every rank holds the same weights and moments, unless
    these are sharded."""
    guard = run.stateful.guard
    if guard.watches:
        evaluations.compare_with_start(run, step)
        run.folder.keep(guard.saved())
    if dist.rank() == 0 or run.sharded:
        state = {
            "step": step,
            "seconds": run.clock.seconds,
            "useful": run.clock.useful,
            "digest": recipes.digest(run.plan.recipe),
            "recipe": config.dump(run.plan.recipe),
            "images": len(run.plan.index),
            "origin": run.plan.origin,
            "lengths": run.folder.lengths(),
            "shards_read": run.plan.shards_text,
        } | {name: part.state_dict() for name, part in run.stateful._asdict().items()}
        state["optimizer"] = sharded.optimizer_state(run.stateful.optimizer)
        run.folder.save(step, state)
        log.debug("saving step %d", step)
    run.folder.callbacks("checkpoint", step)
