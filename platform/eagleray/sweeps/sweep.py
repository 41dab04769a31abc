"""Define a sweep: recipes, the values that their keys may take, and an objective. Choose the values of its trials."""

import importlib.util
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PlainSerializer, PositiveInt
from pydantic.dataclasses import dataclass

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import STRICT, bundled
from eagleray.config import plugins as loading
from eagleray.config.types import ModelName
from eagleray.config.yaml_text import plain_tree
from eagleray.data.order import rows as shares
from eagleray.runs import recipe as recipes
from eagleray.runs.metrics import KNN_TOP1
from eagleray.runs.recipe import Recipe

KINDS = ("choice", "grid", "uniform", "log", "integer")
RANGES = ("uniform", "log", "integer")
# Matches space.KEY and, for one alternative, alternatives.NAME.space.KEY, where KEY is a key of a recipe.
VARIED = re.compile(r"(?:alternatives\.([^.]+)\.)?space\.(.+)")


@dataclass(frozen=True)
class Values:
    """The values that a key may have: those of a list (kinds choice and grid), or those of a range from low to high
    (kinds uniform, log and integer)."""

    kind: str
    options: tuple[Any, ...]

    def draw(self, rng: random.Random) -> Any:
        """Return a random value; a float is rounded to four significant digits."""
        if self.kind not in RANGES:
            return rng.choice(self.options)
        low, high = self.options
        if self.kind == "integer":
            return rng.randint(low, high)
        if self.kind == "log":
            return tidy(math.exp(rng.uniform(math.log(low), math.log(high))), low, high)
        return tidy(rng.uniform(low, high), low, high)

    def inside(self) -> Any:
        """Return a value to test: of a range of floats one with decimals, if it has any, else the first."""
        low, high = self.options[0], self.options[-1]
        return tidy(low + min(high - low, 1) / 2, low, high) if self.kind in ("uniform", "log") else low


def in_words(value: Any) -> str:
    """Return a value as text for a table or an axis: floats with four digits, None as ""."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def tidy(x: float, low: float, high: float) -> float:
    """Round `x` to four significant digits, which people can read and copy, and clip the result to [low, high]."""
    return min(max(float(f"{x:.4g}"), low), high)


def _values(spec: Any) -> Values:
    """Parse a key's values in the sweep file, such as `{log: [1.0e-4, 1.0e-2]}`. Raises ValueError for another form."""
    if isinstance(spec, Values):
        return spec
    if not isinstance(spec, dict) or len(spec) != 1 or next(iter(spec)) not in KINDS:
        raise ValueError(f"expected one of {', '.join(KINDS)}, such as {{log: [1.0e-4, 1.0e-2]}}")
    [(kind, options)] = spec.items()
    if not isinstance(options, list) or not options:
        raise ValueError(f"{kind}: expected a list with at least one value")
    if kind not in RANGES:
        return Values(kind, tuple(options))
    whole = kind == "integer"
    try:
        if whole and any(isinstance(x, float) and not x.is_integer() for x in options):
            raise ValueError
        low, high = (int(x) if whole else float(x) for x in options)
    except (TypeError, ValueError):
        numbers = "whole numbers" if whole else "numbers"
        raise ValueError(f"{kind}: expected a list of two {numbers}, low and high; got {str(options)[:80]}") from None
    if low > high:
        raise ValueError(f"{kind}: low {low:g} is above high {high:g}")
    if kind == "log" and low <= 0:
        raise ValueError(f"log: low {low:g} is not positive")
    return Values(kind, (low, high))


Space = dict[
    str,
    Annotated[Values, BeforeValidator(_values), PlainSerializer(lambda v: {v.kind: list(v.options)}, dict[str, Any])],
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Objective:
    """The metric by which the trials are compared."""

    key: str = KNN_TOP1  # a key of metrics.jsonl or summary.json
    mode: Literal["max", "min"] = "max"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Branch:
    """A recipe of a sweep, with the keys that are fixed and the keys that vary."""

    recipe: str | dict[str, Any] | None = None  # name or file; after `load`, the resolved recipe as a mapping
    fixed: dict[str, Any] = field(default_factory=dict)  # values that replace the recipe's, by dotted or nested key
    space: Space = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sweep(Branch):
    """A sweep. Its `recipe`, `fixed` and `space` apply to all alternatives, and each alternative may add its own."""

    alternatives: dict[str, Branch] = field(default_factory=dict)
    objective: Objective = Objective()
    search: Literal["random", "grid", "optuna"] = "random"
    scheduler: Literal["asha", "none"] = "asha"
    grace: Annotated[float, Field(gt=0, lt=1)] = 0.1  # asha: share of a trial's steps before it is first compared
    reduction: Annotated[float, Field(gt=1)] = 3.0  # asha: of this many compared trials, one continues
    apart: bool = False  # asha: trials are compared only within their alternative
    trials: PositiveInt | None = None  # number of trials; None: 16, or all points of a grid
    seed: NonNegativeInt = 0  # seed of the search; the seed of a trial is a key of its recipe
    cpus: PositiveInt = 1  # CPU threads of each trial, or of each of its workers
    gpus: Annotated[float, Field(gt=0, le=1)] | None = None  # share of a GPU for each trial; None: a whole GPU
    hours: Annotated[float, Field(gt=0)] | None = None  # hours after which running trials save and stop
    out: str | None = None  # folder of the sweep; None: runs/<sweep name>
    # Name of a model in MLflow's registry; at the end the best trial is registered as its new version.
    register: ModelName | None = None

    def __post_init__(self) -> None:
        if self.search == "grid" and self.scheduler != "none":
            raise ValueError(
                f"search=grid trains every trial to its end: expected scheduler=none, not {self.scheduler}"
            )
        if self.search == "grid" and self.trials:
            raise ValueError(
                f"trials={self.trials}: cannot be set with search=grid, whose points determine the number of trials"
            )


def load(name: str, overrides: Sequence[str] = (), plugins: Sequence[str] = ()) -> Sweep:
    """Return a sweep, given by file or name, with its recipes resolved. If it has no alternatives, it gets one without
    a name. An override sets `out`, a key of the sweep (`sweep.KEY`), or a key of the recipe in all trials. `plugins`
    are added to those of every recipe. Raises UserError when the sweep or one of its recipes is wrong."""
    path = bundled.find_sweep(name)
    pinned: list[dict[str, Any]] = []
    tree = config.read(path)
    for item in overrides:
        key, equals, text = item.partition("=")
        if equals and (key == "out" or key.startswith("sweep.")):
            tree = _change(tree, key.removeprefix("sweep."), text)
        else:
            pinned.append(config.override(item))
    own = config.check(Sweep, tree, path.name)
    branches = own.alternatives or {"": Branch()}
    whole = {n: _join(own, b, pinned, path, f"alternatives.{n}: " * bool(n), plugins) for n, b in branches.items()}
    fields = {k: getattr(own, k) for k in own.__dataclass_fields__ if k not in ("recipe", "fixed", "space")}
    fields |= {"alternatives": whole, "out": own.out or f"runs/{path.stem}"}
    sweep = Sweep(**fields)
    check(sweep, path.name)
    return sweep


def _change(tree: dict[str, Any], key: str, text: str) -> dict[str, Any]:
    """Return the tree of a sweep with the value of a key replaced by the YAML `text`. `space.KEY` sets the values of a
    recipe's key in every alternative, `alternatives.NAME.space.KEY` in one. Raises UserError for an unknown NAME."""
    if not (found := VARIED.fullmatch(key)):
        return config.merge(tree, config.override(f"{key}={text}"))
    name, varied = found.groups()
    values, listed = config.override(f"values={text}")["values"], tree.get("alternatives")
    if varied.endswith(tuple(f".{kind}" for kind in KINDS)):  # an example is optim.lr.value.log=[1.0e-4, 1.0e-2]
        varied, _, kind = varied.rpartition(".")
        values = {kind: values}
    known = listed.items() if isinstance(listed, dict) else ()
    alternatives = {n: branch if isinstance(branch, dict) else {} for n, branch in known}
    if name and name not in alternatives:
        raise UserError(f"sweep.alternatives.{name}: no such alternative{config.nearest(name, [*alternatives])}")
    names = [name] if name else [n for n, branch in alternatives.items() if varied in (branch.get("space") or ())]
    for given in (dict[str, Any](), values):  # {} first removes the old values, as `merge` would keep them
        space = {"space": {varied: given}}
        if names:
            tree = config.merge(tree, {"alternatives": dict.fromkeys(names, space)})
        if not name:
            tree = config.merge(tree, space)
    return tree


def _join(
    sweep: Sweep, own: Branch, pinned: Sequence[Mapping[str, Any]], path: Path, where: str, plugins: Sequence[str]
) -> Branch:
    """Return an alternative with its resolved recipe and all its keys that vary. Values of the recipe are replaced by
    the fixed ones of the sweep, then of the alternative `own`, then by those of the overrides `pinned`."""
    name, beside = own.recipe or sweep.recipe, path.parent
    if not name:
        raise UserError(f"{path.name}: {where}recipe: missing; expected a name of `eagleray list recipes`, or a file")
    if isinstance(name, dict):  # resolved already, as in the sweep.yaml of a sweep's folder
        tree = name
        if "base" in tree:
            raise UserError(
                f"{path.name}: {where}recipe.base: cannot be set here; expected `recipe: {tree['base']}`, and the "
                "other keys as `fixed`"
            )
    else:
        _, tree = bundled.read_recipe(name, beside=beside)
        beside = (beside / name).parent if name.endswith((".yaml", ".yml")) else beside
    for fixed in (sweep.fixed, own.fixed, *pinned):
        tree = put(tree, fixed)
    listed = [*(tree.get("plugins") or ()), *plugins]
    if listed:  # resolved here, as trials find plug-ins by their digests
        tree["plugins"] = loading.resolve(listed, folder=beside)
    space = {k: v for k, v in (sweep.space | own.space).items() if all(k not in config.flatten(p) for p in pinned)}
    return Branch(recipe=plain_tree(Recipe, tree), space=space)  # sweep.yaml has plain values


def put(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tree in which `values`, by dotted key, are merged."""
    out = dict(tree)
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        out = config.merge(out, value)
    return out


def recipe_of(sweep: Sweep, branch: str, values: Mapping[str, Any], where: str) -> Recipe:
    """Return the recipe of a trial: the recipe of the alternative `branch` with the trial's values. Raises UserError,
    whose message begins with `where`, when it is wrong."""
    tree = sweep.alternatives[branch].recipe
    assert isinstance(tree, dict)
    return recipes.check(put(tree, values), where)


def count_trials(sweep: Sweep) -> int:
    """Return the number of trials of a sweep."""
    if sweep.search == "grid":
        return sum(math.prod(len(v.options) for v in b.space.values()) for b in sweep.alternatives.values())
    return sweep.trials or 16


def check(sweep: Sweep, source: str) -> None:
    """Check the keys that vary, and build recipes from their extreme values. Raises UserError for a key that cannot
    vary or whose kind does not suit `search`, or when such a recipe is wrong. Messages begin with `source`."""
    for name, branch in sweep.alternatives.items():
        where = f"{source}: " + f"alternatives.{name}: " * bool(name)
        if not branch.space:
            raise UserError(f"{where}space: empty; expected keys to vary, with their values")
        assert isinstance(branch.recipe, dict)
        leaves = config.flatten(branch.recipe)
        for key, v in branch.space.items():
            if key in ("out", "workers"):
                raise UserError(f"{where}space.{key}: cannot vary between trials; set it for all with {key}=VALUE")
            if isinstance(value := leaves.get(above := key.rpartition(".")[0]), str | int | float):
                raise UserError(f"{where}{above}={value}: expected a mapping, as space.{key} varies a key of it")
            if (v.kind in RANGES and sweep.search == "grid") or (v.kind == "grid" and sweep.search != "grid"):
                raise UserError(f"{where}space.{key}: {v.kind} values cannot be searched by search={sweep.search}")
        for values in (*corners(branch.space), {k: v.inside() for k, v in branch.space.items()}):
            setting = ", ".join(f"{k}={v}" for k, v in values.items())
            r = recipe_of(sweep, name, values, f"{where}with {setting}")
            if r.optim.batch % r.data.lanes:
                raise UserError(
                    f"{where}with {setting}: optim.batch={r.optim.batch} is not a multiple of data.lanes={r.data.lanes}"
                )
            shares(r.data.lanes, r.optim.batch, ranks=r.ranks[1])


def corners(space: Space) -> list[dict[str, Any]]:
    """Return values of all keys with which to test a recipe. Each value of a list and each end of a range is combined
    with the first values of all other keys, and with their last values."""
    first = {k: v.options[0] for k, v in space.items()}
    last = {k: v.options[-1] for k, v in space.items()}
    return [first, last] + [{**base, k: x} for k, v in space.items() for x in v.options for base in (first, last)]


def suggest(sweep: Sweep, number: int, rows: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the alternative and the values of the trial with index `number`. Only Optuna uses other trials' `rows`."""
    if sweep.search == "grid":
        points = (
            (name, dict(zip(b.space, point, strict=True)))
            for name, b in sweep.alternatives.items()
            for point in itertools.product(*(v.options for v in b.space.values()))
        )
        return next(itertools.islice(points, number, None))
    if sweep.search == "optuna":
        return _ask(sweep, number, rows)
    rng = random.Random(f"{sweep.seed}/{number}")
    name = list(sweep.alternatives)[number % len(sweep.alternatives)]  # chance might omit an alternative
    return name, {k: v.draw(rng) for k, v in sweep.alternatives[name].space.items()}


def _ask(sweep: Sweep, number: int, rows: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return what `suggest` does, with Optuna. Its state is not saved but rebuilt from the rows of the other trials."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError("search=optuna: optuna is not installed; `pip install eagleray[tune]` installs it")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize" if sweep.objective.mode == "max" else "minimize",
        sampler=optuna.samplers.TPESampler(seed=sweep.seed + number),
    )
    names = list(sweep.alternatives)
    for row in rows:
        if row["metric"] is None or row["state"] not in ("finished", "stopped"):
            continue
        space = sweep.alternatives[row["alternative"]].space
        at: dict[str, Any] = {"alternative": optuna.distributions.CategoricalDistribution(names)}
        at |= {f"{row['alternative']}/{k}": _distribution(v) for k, v in space.items()}
        params = {"alternative": row["alternative"]}
        params |= {f"{row['alternative']}/{k}": row["values"][k] for k in space}
        early = row["state"] == "stopped"
        study.add_trial(
            optuna.trial.create_trial(
                params=params,
                distributions=at,
                value=None if early else row["metric"],
                state=optuna.trial.TrialState.PRUNED if early else optuna.trial.TrialState.COMPLETE,
                intermediate_values={row["step"]: row["metric"]} if early else None,
            )
        )
    trial = study.ask()
    name = trial.suggest_categorical("alternative", names)
    values = {}
    for key, v in sweep.alternatives[name].space.items():
        x = trial._suggest(f"{name}/{key}", _distribution(v))
        values[key] = tidy(x, *v.options) if v.kind in ("uniform", "log") else x
    return name, values


def _distribution(v: Values) -> Any:
    """Return the values of a key as a distribution of Optuna."""
    from optuna import distributions as d

    if v.kind not in RANGES:
        return d.CategoricalDistribution(v.options)
    low, high = v.options
    return d.IntDistribution(low, high) if v.kind == "integer" else d.FloatDistribution(low, high, log=v.kind == "log")
