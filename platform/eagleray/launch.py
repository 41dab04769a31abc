"""What the commands do: check what was given, run it in the right world, and say where everything is."""

import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from eagleray import checkpoint, config, files, place, run, sweep, track
from eagleray import recipe as recipes
from eagleray.cluster import world
from eagleray.cluster.ray_map import ray_map
from eagleray.console import Follow, out
from eagleray.data import card
from eagleray.data import prepare as preparing
from eagleray.data.index import open_index
from eagleray.data.sources.job import Job
from eagleray.errors import UserError
from eagleray.evals import protocols
from eagleray.export import snippet, to_timm
from eagleray.methods.method import Method
from eagleray.models.backbone import TESTED
from eagleray.recipe import Evaluate, Recipe
from eagleray.ticks import Ticks
from eagleray.track import Tracking, tracking_uri


def pretrain(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Start or continue a run and see it through. Returns its summary; raises UserError, or SystemExit when stopped."""
    recipe = run.resolve(recipes.load(name, overrides))
    place.check_writable(recipe.out or "")
    folder = place.view(recipe.out or "")
    following = place.Following(recipe.out or "")
    following.copy.fetch()
    check_same(recipe, folder)
    plan = run.plan(recipe, note=lambda line: out.print(line, markup=False))
    run.try_sizes(recipe)
    tracking = tracked(recipe)
    summary = finished(folder, plan.steps)
    if summary:
        out.print(f"done already: {recipe.out} has taken its {plan.steps} steps", markup=False)
        track.send_missing(folder, tracking, config.flat(config.plain(recipe)))
        if (folder / "mlflow.json").exists():
            place.put(recipe.out or "", "mlflow.json", (folder / "mlflow.json").read_text())
    else:
        begin(recipe)
        with Follow(folder, plan.steps), following, stoppable(recipe.out or ""):
            summary = in_world(recipe, tracking)
        if summary is None:
            sys.exit(1)
    conclude(recipe.out or "", folder, summary, tracking)
    return summary


def tracked(recipe: Recipe) -> Tracking:
    """Where the run's history goes: MLFLOW_TRACKING_URI, else a database beside the run's folder."""
    out = recipe.out or ""
    uri = tracking_uri(place.view(out), os.environ.get("MLFLOW_TRACKING_URI"))
    return Tracking(uri, name=out.rpartition("/")[2])


def begin(recipe: Recipe) -> None:
    """Leave what the run is where it is kept."""
    place.put(recipe.out or "", "recipe.yaml", config.dump(recipe))
    place.put(recipe.out or "", "environment.json", json.dumps(environment(), indent=1))
    for left in (".stop", ".failure"):
        place.drop(recipe.out or "", left)


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
    old, new = recipes.identity(config.load(Recipe, stored)), recipes.identity(recipe)
    differ = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    if differ:
        there = ", ".join(f"{k} is {old.get(k)} there and {new.get(k)} here" for k in differ[:3])
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise UserError(
            f"out={folder}: holds another run: {there}{more}; give another out=, or continue that run with "
            f"`eagleray pretrain {stored}`"
        )


def finished(folder: Path, steps: int) -> dict[str, Any] | None:
    """The summary of a run that has taken at least so many steps."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else None
    return summary if summary and summary["steps"] >= steps else None


@contextmanager
def stoppable(place_of_run: str) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C asks the run to save and stop; a second Ctrl-C ends it at once."""

    def ask(number: int, frame: Any) -> None:
        place.put(place_of_run, ".stop", "")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out.print("stopping after this step; once more ends at once")

    before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


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


def environment() -> dict[str, Any]:
    """What a run was made with."""
    names = ("eagleray", "torch", "torchvision", "timm", "numpy", "pillow", "ray", "mlflow", "webdataset", "boto3")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": devices}
    return {"python": platform.python_version(), "packages": versions, **machine, "command": sys.argv}


def load(path: str) -> tuple[Recipe, Method, Path]:
    """The recipe, method and folder of a run, of its newest checkpoint or of a checkpoint file. Raises UserError."""
    file = Path(path)
    if place.remote(path) or file.is_dir():
        folder = place.view(path.rstrip("/"))
        state = checkpoint.newest(f"{path.rstrip('/')}/checkpoints", folder / "checkpoints")
        if state is None:
            raise UserError(f"{path}: no intact checkpoint in its checkpoints/")
    else:
        folder = file.parent.parent
        if file.with_suffix(".json").exists() and not checkpoint.intact(file):
            raise UserError(f"{path}: is damaged: it is not what its manifest says")
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            yaml.safe_load(state["recipe"]), state["method"].keys(), state["images"]
        except FileNotFoundError:
            raise UserError(f"{path}: no such checkpoint") from None
        except Exception as e:  # torch names a damaged file in many ways
            raise UserError(f"{path}: is not a checkpoint of this program ({type(e).__name__})") from None
    recipe = config.check(Recipe, yaml.safe_load(state["recipe"]), path)
    method = run.build(recipe)
    method.begin(state["images"])
    method.load_state_dict(state["method"])
    return recipe, method, folder


def evaluate(path: str, train: str, test: str | None, names: Sequence[str]) -> dict[str, float]:
    """Scores of a checkpoint's backbone on shards, labelled ones where a protocol needs that. Raises UserError."""
    for name in names:
        if name not in protocols.PROTOCOLS:
            raise UserError(f"--protocol {name}: unknown{config.nearest(name, protocols.PROTOCOLS)}")
    recipe, method, folder = load(path)

    def say(line: str) -> None:
        out.print(line, markup=False)

    tested = open_index(test, folder, note=say) if test else None
    images = open_index(train, folder, note=say)
    sets = protocols.Sets.of(images, tested, None)
    if set(names) & set(protocols.LABELLED) and (sets is None or not len(sets.test_samples)):
        raise UserError(f"--train {train} --test {test}: no labels there, and evaluation needs them")
    settings = replace(recipe.evaluate, probe_epochs=recipe.evaluate.probe_epochs or Evaluate().probe_epochs)
    backbone = method.export().to(world.local().device)
    scores = protocols.evaluate(backbone, sets, settings, protocols=names, images=images if tested is None else tested)
    for name in names:
        how = sets.how(recipe, name) if sets and name in protocols.LABELLED else ""
        out.print(f"{name} {protocols.told(name, scores)}{how}", markup=False)
    return scores


def prepare(job: Job, *, workers: int | None) -> None:
    """Write shards, index and card of a source: in this process, or as so many Ray tasks at once, None meaning as many
    as there are CPUs. Raises UserError and Outage."""
    job = job.resolved()
    with Ticks() as ticks:
        done = preparing.prepare(
            job,
            run=map if workers == 0 else partial(ray_map, workers=workers),
            command=card.command(sys.argv[1:]),
            note=lambda line: out.print(line, markup=False),
            tick=ticks,
        )
    for line in card.lines(done):
        out.print(line, markup=False)
    out.print(f"{job.destination}: shards, index.parquet and {card.NAME}", markup=False)


def export(path: str, destination: Path | None) -> None:
    """Write a checkpoint's backbone for timm. Raises UserError."""
    recipe, method, folder = load(path)
    target = destination or folder / "export"
    file = to_timm(method.export(), recipe.backbone, target)
    out.print(f"{file}\nload it   {snippet(target)}", markup=False)


def catalogue(kind: str) -> dict[str, str]:
    """Names and one line about each."""
    if kind == "backbones":
        return dict.fromkeys(TESTED, "tested; any other model of timm may do")
    if kind == "methods":
        package = "eagleray.methods"
        classes = {n: config.part(package, n) for n in config.parts(package)}
        return {n: (inspect.getdoc(sys.modules[c.__module__]) or "").splitlines()[0] for n, c in classes.items()}
    if kind == "sweeps":
        lines = {n: sweep.find(n).read_text().splitlines()[0] for n in sweep.names()}
        return {n: line.removeprefix("#").strip() for n, line in lines.items()}
    return {n: headline(recipes.find(n).read_text()) for n in recipes.names()}


def headline(text: str) -> str:
    """A recipe's first line, and what its header says was published."""
    lines = [line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())]
    published = re.search(r"Published: .+?(?= Cost: )", " ".join(lines))
    return f"{lines[0]} {published[0]}" if published else lines[0]
