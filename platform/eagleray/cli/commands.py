"""What the commands do: check what was given, run it in the right world, and say where everything is."""

import importlib.metadata
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base import files
from eagleray.base.console import out, stop_on_signal
from eagleray.base.errors import UserError
from eagleray.base.progress import FollowRun, PhaseProgress
from eagleray.cluster.ray_map import ray_map
from eagleray.datasets import card
from eagleray.datasets import prepare as preparing
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.engine import world
from eagleray.engine.export import snippet, to_timm
from eagleray.models import weights
from eagleray.runs import pretrain as run
from eagleray.runs import recipe as recipes
from eagleray.runs import remote
from eagleray.runs import tracking as track
from eagleray.runs.build import build_backbone, check_sizes
from eagleray.runs.environment import environment
from eagleray.runs.plan import make_plan, resolve_paths
from eagleray.runs.recipe import Recipe
from eagleray.runs.restore import pretrained, restore
from eagleray.runs.run_dir import finished
from eagleray.runs.tracking import Tracking, tracking_of


def pretrain(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Start or continue a run and see it through. Returns its summary; raises UserError, or SystemExit when stopped."""
    recipe = resolve_paths(recipes.load(name, overrides))
    kept = recipe.out or ""
    remote.check_writable(kept)
    folder = remote.view(kept)
    following = remote.Follower(kept)
    following.copy.fetch()
    check_same(recipe, folder)
    plan = make_plan(recipe, note=lambda line: out.print(line, markup=False))
    check_sizes(recipe)
    tracking = tracking_of(kept)
    summary = finished(folder, plan.steps)
    if summary:
        out.print(f"done already: {kept} has taken its {plan.steps} steps", markup=False)
        track.send_missing(folder, tracking, config.flat(config.plain(recipe)))
        if (folder / "mlflow.json").exists():
            remote.put(kept, "mlflow.json", (folder / "mlflow.json").read_text())
    else:
        start(kept, recipe, folder)
        begin(kept, recipe)
        # In a thread: the signal may come while this one is in the middle of a request to the same store.
        ask = threading.Thread(target=remote.put, args=(kept, ".stop", "")).start
        with FollowRun(folder, plan.steps), following, stop_on_signal(ask, "stopping after this step"):
            summary = in_world(recipe, tracking)
        if summary is None:
            sys.exit(1)
    conclude(kept, folder, summary, tracking)
    return summary


def start(kept: str, recipe: Recipe, folder: Path) -> None:
    """Say what a new run's backbone takes over of backbone.weights. Raises UserError when that is too little."""
    if recipe.backbone.weights and not files.read_lines(folder / "metrics.jsonl"):
        report = weights.fill(build_backbone(recipe), pretrained(recipe.backbone.weights))
        remote.put(kept, "weights.txt", "\n".join(report.lines()) + "\n")
        out.print(f"{report}: {kept}/weights.txt", markup=False)


def begin(kept: str, recipe: Recipe) -> None:
    """Leave what the run is where it is kept."""
    remote.put(kept, "recipe.yaml", config.dump(recipe))
    remote.put(kept, "environment.json", json.dumps(environment(), indent=1))
    for left in (".stop", ".failure"):
        remote.drop(kept, left)


def in_world(recipe: Recipe, tracking: Tracking) -> dict[str, Any] | None:
    if recipe.workers:
        if importlib.util.find_spec("ray") is None:
            raise UserError(f"workers={recipe.workers}: ray is not installed; workers=0 runs without")
        from eagleray.cluster import ray_train

        return ray_train.launch(recipe, tracking=tracking)
    return run.pretrain(recipe, world.local(), tracking=tracking, command=time.time())


def check_same(recipe: Recipe, folder: Path) -> None:
    """Raises UserError when the folder holds a run of another recipe, naming what differs and both ways out."""
    stored, begun = folder / "recipe.yaml", files.read_lines(folder / "metrics.jsonl")
    if not stored.exists() or not begun:
        return
    differ = config.differences(recipes.identity(config.load(Recipe, stored)), recipes.identity(recipe))
    if differ:
        raise UserError(
            f"out={folder}: holds another run: {differ}; give another out=, or continue that run with "
            f"`eagleray pretrain {stored}`"
        )


def conclude(kept: str, folder: Path, summary: dict[str, Any], tracking: Tracking) -> None:
    lost = f", goodput {summary['goodput']:.0%}" if summary["restarts"] else ""
    out.print(
        f"{summary['steps']} steps, {summary['images']} images, {summary['restarts']} restart(s){lost}, "
        f"{summary['bad_samples']} bad sample(s), {summary['wall_seconds']:.0f} s\n"
        f"results   {kept}/summary.json, metrics.jsonl, train.log\n"
        f"export    {kept}/export/backbone.safetensors\n"
        f"load it   {snippet(folder / 'export')}\n"
        f"history   {history(tracking.uri)}",
        markup=False,
    )


def history(tracking: str) -> str:
    """The command that opens MLflow's pages, or their address where a server shows them already."""
    if not tracking.startswith("sqlite:"):
        return track.shown(tracking)
    here = Path(os.path.relpath(sys.executable)).parent / "mlflow"
    return f"{here if here.exists() else 'mlflow'} ui --backend-store-uri {tracking}"


def prepare(options: PrepareOptions, *, workers: int | None) -> None:
    """Write shards, index and card of a source: in this process, or as so many Ray tasks at once, None meaning as many
    as there are CPUs. Raises UserError and Outage."""
    options = options.resolved()
    with PhaseProgress() as ticks:
        done = preparing.prepare(
            options,
            run=map if workers == 0 else partial(ray_map, workers=workers),
            command=card.command(sys.argv[1:]),
            note=lambda line: out.print(line, markup=False),
            tick=ticks,
        )
    for line in card.lines(done):
        out.print(line, markup=False)
    out.print(f"{options.destination}: shards, index.parquet and {card.NAME}", markup=False)


def export(path: str, destination: Path | None) -> None:
    """Write a checkpoint's backbone for timm. Raises UserError."""
    recipe, method, folder = restore(path)
    target = destination or folder / "export"
    file = to_timm(method.export(), recipe.backbone, target)
    out.print(f"{file}\nload it   {snippet(target)}", markup=False)
