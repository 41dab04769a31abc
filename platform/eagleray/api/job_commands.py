"""Pack any long command for a cluster, after checking on this machine what can be checked here."""

from collections.abc import Sequence
from pathlib import Path

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.cluster import job_package
from eagleray.cluster.job_package import JobPackage, check_place
from eagleray.models.network import is_public

RUNS = ("pretrain", "finetune")
COMMANDS = (*RUNS, "tune", "evaluate", "prepare", "index")
FLAGS = ("--resume", "--json", "--untrained", "--dedup", "--gpus")  # options without a value
# Options whose values other nodes must find.
PLACES = ("train", "test", "coco", "masks", "davis", "frames", "suite", "out", "labels", "images", "columns")
SWEEP = "sweep.yaml"


def pack(command: str, words: Sequence[str], plugins: Sequence[str | Path], gpus: int | None) -> JobPackage:
    """Return the package of a command, after checking it. `words` are those that follow the command on the command
    line, without plug-ins; `gpus` is the number of workers with a GPU each. Raises UserError."""
    names, options = split(words)
    if command == "evaluate" and gpus:
        if "--workers" in options:
            raise UserError(f"--gpus {gpus} and --workers: expected only one of the two, as --gpus sets the number")
        words, gpus = [*words, "--workers", str(gpus), "--gpus"], None
        names, options = split(words)
    if command in RUNS:
        return _run(command, names, options, plugins, gpus)
    if gpus:
        raise UserError(f"--gpus {gpus}: only for runs and evaluate; a sweep's trials take workers=N gpus=true")
    for name in PLACES:
        if isinstance(place := options.get(f"--{name}"), str):
            check_place(f"--{name}", place)
    packers = {"tune": _tune, "evaluate": _evaluate, "prepare": _prepare, "index": _index}
    return packers[command](names, options, words, plugins)


def split(words: Sequence[str]) -> tuple[list[str], dict[str, str | bool]]:
    """Return the words of a command line that are no options, and the options with their values."""
    names: list[str] = []
    options: dict[str, str | bool] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        if not word.startswith("--"):
            names.append(word)
        elif word in FLAGS:
            options[word] = True
        elif equals or rest:
            options[key] = value if equals else rest.pop(0)
        else:
            raise UserError(f"{word}: expected a value after it")
    return names, options


def _run(
    command: str, names: list[str], options: dict[str, str | bool], plugins: Sequence[str | Path], gpus: int | None
) -> JobPackage:
    """A run: its recipe with every default written out is all that it needs."""
    if options:
        raise UserError(f"{next(iter(options))}: no such option of submit {command}")
    if command == "finetune":
        weights, *names = names
        if not weights.startswith(("timm:", "hf:")):
            check_place("WEIGHTS", weights)
        names.append(f"backbone.weights={weights}")
    if not names:
        raise UserError(f"submit {command}: RECIPE is missing")
    return job_package.pack(names[0], names[1:], gpus, plugins, command=command)


def _tune(
    names: list[str], options: dict[str, str | bool], words: Sequence[str], plugins: Sequence[str | Path]
) -> JobPackage:
    """A sweep: the file that is sent has its recipes in it."""
    from eagleray.sweeps.run import check_objective
    from eagleray.sweeps.sweep import corners, count_trials, load, recipe_of

    sweep = load(names[0], names[1:], [str(p) for p in plugins])
    check_place("out", sweep.out or "")
    check_objective(sweep)
    for name, branch in sweep.alternatives.items():
        recipe = recipe_of(sweep, name, corners(branch.space)[0], f"alternatives.{name}" if name else names[0])
        job_package.check_data_places(recipe)
        job_package.check_lanes(recipe)
    options["--resume"] = True  # sent again, an interrupted one continues; a new one begins all the same
    given = [word for key, value in options.items() for word in ([key] if value is True else [key, str(value)])]
    text = config.dump(sweep)
    asks = f"{count_trials(sweep)} trials of {recipe.workers} worker(s), as many at once as fit"
    name = Path(names[0]).stem
    return job_package.pack_words("tune", name, sweep.out or "", [SWEEP, *given], plugins, {SWEEP: text}, asks=asks)


def _evaluate(
    names: list[str], options: dict[str, str | bool], words: Sequence[str], plugins: Sequence[str | Path]
) -> JobPackage:
    """An evaluation: of what the nodes can reach, on workers, as the head computes nothing."""
    [backbone] = _exactly(names, "evaluate", "BACKBONE")
    stored = not (backbone.startswith("untrained:") or is_public(backbone))
    if stored:
        check_place("backbone", backbone)
    out = str(options.get("--out") or (backbone if stored else ""))
    if not out:
        raise UserError(f"{backbone}: --out is missing; expected the folder for its results, {job_package.SHARED[9:]}")
    if str(options.get("--workers", "0")) == "0":
        raise UserError(
            "--workers: missing; expected how many workers evaluate, as the cluster's head does not compute"
        )
    asks = f"{options['--workers']} worker(s)" + (" with a GPU each" if "--gpus" in options else "")
    return job_package.pack_words("evaluate", Path(backbone).name, out, words, plugins, asks=asks)


def _prepare(
    names: list[str], options: dict[str, str | bool], words: Sequence[str], plugins: Sequence[str | Path]
) -> JobPackage:
    """A data set: read and written where the nodes find it, by tasks on them."""
    source, origin, destination = _exactly(names, "prepare", "SOURCE", "FROM", "DST")
    check_place("FROM", origin)
    check_place("DST", destination)
    if options.get("--workers") == "0":
        raise UserError("--workers 0: expected at least one, as the cluster's head does not compute")
    asks = f"{options['--workers']} task(s)" if "--workers" in options else "a task on every CPU"
    return job_package.pack_words("prepare", source, destination, words, plugins, asks=asks)


def _exactly(names: Sequence[str], command: str, *wanted: str) -> Sequence[str]:
    """Return the words of a command that are no options. Raises UserError when they are more or fewer than wanted."""
    if len(names) != len(wanted):
        got = " ".join(names) or "none"
        raise UserError(f"submit {command}: expected {' '.join(wanted)} and options that begin with --, got {got}")
    return names


def _index(
    names: list[str], options: dict[str, str | bool], words: Sequence[str], plugins: Sequence[str | Path]
) -> JobPackage:
    """An index of shards that are there already."""
    [url] = _exactly(names, "index", "URL")
    check_place("URL", url)
    return job_package.pack_words("index", "shards", url, words, plugins, asks="a task for each shard")
