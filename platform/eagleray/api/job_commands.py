"""Pack a long command for a cluster, after checking on this machine what can be checked here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.cluster import job_package
from eagleray.cluster.job_package import JobPackage, check_place
from eagleray.models.network import is_public
from eagleray.runs.sources import absolute
from eagleray.runs.stop_request import check_hours

RUNS = ("pretrain", "finetune")
COMMANDS = (*RUNS, "tune", "evaluate", "prepare", "index")
# Options whose values are paths or URLs that other nodes must find.
PLACES = ("train", "test", "coco", "masks", "davis", "suite", "out", "labels", "images", "columns")
SWEEP = "sweep.yaml"
Options = Mapping[str, Any]
Plugins = Sequence[str | Path]


def pack(command: str, arguments: Sequence[str], options: Options, plugins: Plugins, gpus: int | None) -> JobPackage:
    """Check a command on this machine, and return its package for the cluster. `arguments` are its positional
    arguments, `options` its options by name, without those for plug-ins, and `gpus` is the number of workers, each with
    one GPU. Raises UserError for arguments, options or paths that cannot work on the cluster."""
    if command in RUNS:
        return _run(command, arguments, options, plugins, gpus)
    if gpus and command != "evaluate":
        raise UserError(f"--gpus {gpus}: only for runs and evaluate; a sweep's trials take workers=N gpus=true")
    if gpus and "workers" in options:
        raise UserError(f"--gpus {gpus} and --workers: expected only one of the two, as --gpus sets the number")
    if gpus:
        options = {**options, "workers": gpus, "gpus": True}
    for name in PLACES:
        if options.get(name):
            check_place(f"--{name}", str(options[name]))
    packers = {"tune": _tune, "evaluate": _evaluate, "prepare": _prepare, "index": _index}
    return packers[command](arguments, options, plugins)


def limited(package: JobPackage, hours: float) -> JobPackage:
    """Return the package of a run with a limit of `hours` hours. Raises UserError when the command is not a run, or
    `hours` is negative or NaN."""
    check_hours(hours)
    if package.command not in RUNS:
        instead = "; a sweep has sweep.hours" * (package.command == "tune")
        raise UserError(f"--max-hours {hours:g}: only for runs{instead}")
    return replace(package, words=(*package.words, "--max-hours", f"{hours:g}"))


def words_of(options: Options) -> list[str]:
    """Return options as arguments of a command line."""
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    wanted = {name: value for name, value in given.items() if value is not None and value is not False}
    return [word for name, value in wanted.items() for word in ([name] if value is True else [name, str(value)])]


def _run(command: str, arguments: Sequence[str], options: Options, plugins: Plugins, gpus: int | None) -> JobPackage:
    """Return the package of a run. Its recipe, with every default written out, is all that it needs."""
    for word in (*words_of(options), *arguments):
        if word.startswith("--"):
            raise UserError(f"{word.partition('=')[0]}: no such option of submit {command}")
    if command == "finetune":
        weights, *arguments = arguments
        if not is_public(absolute(weights)):
            check_place("WEIGHTS", weights)
        arguments.append(f"backbone.weights={weights}")
    if not arguments:
        raise UserError(f"submit {command}: RECIPE is missing")
    return job_package.pack(arguments[0], arguments[1:], gpus, plugins, command=command)


def _tune(arguments: Sequence[str], options: Options, plugins: Plugins) -> JobPackage:
    """Return the package of a sweep. The sweep file in it contains the sweep's recipes."""
    from eagleray.sweeps.checks import check_objective
    from eagleray.sweeps.sweep import corners, count_trials, load, recipe_of

    name, *keys = arguments
    sweep = load(name, keys, [str(p) for p in plugins])
    check_place("out", sweep.out or "")
    check_objective(sweep)
    used: list[Any] = []  # the plug-ins of all recipes
    for alternative, branch in sweep.alternatives.items():
        where = f"alternatives.{alternative}" if alternative else name
        for values in corners(branch.space):
            recipe = recipe_of(sweep, alternative, values, where)
            job_package.check_data_places(recipe)
            used += recipe.plugins
    # With --resume an interrupted sweep that is submitted again continues; a new sweep begins in any case.
    words = [SWEEP, *words_of({**options, "resume": True})]
    text = config.dump(sweep)
    asks = f"{count_trials(sweep)} trials of {recipe.workers} worker(s), as many at once as fit"
    given = Path(name).stem, sweep.out or "", words, plugins, {SWEEP: text}
    return job_package.pack_words("tune", *given, asks=asks, used=used)


def _evaluate(arguments: Sequence[str], options: Options, plugins: Plugins) -> JobPackage:
    """Return the package of an evaluation. All nodes must be able to read the backbone, and `workers` is required, as
    the head does not compute."""
    [backbone] = _exactly(arguments, "evaluate", "BACKBONE")
    stored = not (backbone.startswith("untrained:") or is_public(absolute(backbone)))
    if stored:
        check_place("backbone", backbone)
    run = stored and not (options.get("architecture") or backbone.rstrip("/").endswith((".safetensors", "/export")))
    out = str(options.get("out") or (backbone if run else ""))  # others' results would go with the job's own folder
    if not out:
        raise UserError(f"{backbone}: --out is missing; expected the folder for its results, {job_package.SHARED[9:]}")
    if not options.get("workers"):
        raise UserError(
            "--workers: missing; expected how many workers evaluate, as the cluster's head does not compute"
        )
    asks = f"{options['workers']} worker(s)" + (" with a GPU each" if options.get("gpus") else "")
    words = [backbone, *words_of(options)]
    return job_package.pack_words("evaluate", Path(backbone).name, out, words, plugins, asks=asks)


def _prepare(arguments: Sequence[str], options: Options, plugins: Plugins) -> JobPackage:
    """Return the package of `prepare`: tasks read the source and write the data set where all nodes find them."""
    source, origin, destination = _exactly(arguments, "prepare", "SOURCE", "FROM", "DST")
    check_place("FROM", origin)
    check_place("DST", destination)
    workers = options.get("workers")
    if workers == 0:
        raise UserError("--workers 0: expected at least one, as the cluster's head does not compute")
    asks = "a task on every CPU" if workers is None else f"{workers} task(s)"
    words = [*arguments, *words_of(options)]
    return job_package.pack_words("prepare", source, destination, words, plugins, asks=asks)


def _index(arguments: Sequence[str], options: Options, plugins: Plugins) -> JobPackage:
    """Return the package that writes the index of existing shards."""
    [url] = _exactly(arguments, "index", "URL")
    check_place("URL", url)
    words = [url, *words_of(options)]
    return job_package.pack_words("index", "shards", url, words, plugins, asks="a task for each shard")


def _exactly(arguments: Sequence[str], command: str, *wanted: str) -> Sequence[str]:
    """Return the arguments of a command. Raises UserError unless there is one for each name in `wanted`."""
    if len(arguments) != len(wanted):
        got = " ".join(arguments) or "none"
        raise UserError(f"submit {command}: expected {' '.join(wanted)} and options, got {got}")
    return arguments
