"""Append the results of protocols to results.json, and print them as tables.

A result is stored with its settings, backbone, data and date. In a table, its numbers are beside those of the untrained
backbone and of the paper."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from eagleray import config
from eagleray.base.errors import Busy, UserError
from eagleray.base.files import lock_folder, writing
from eagleray.base.text import aligned
from eagleray.config import bundled
from eagleray.runs import layout, metrics
from eagleray.runs import recipe as recipes
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store

NAME = layout.RESULTS
UNTRAINED = "untrained:"  # prefix that the name of a backbone with random weights has
# Maps the metrics of `published` in recipes to the protocols' numbers that compare with them. For `linear` this is the
# best epoch on random crops, as the papers' scripts print it, and not the result of the probe on cached features.
PUBLISHED = {
    "knn": metrics.KNN_TOP1,
    "linear": "linear_augmented/best",
    "average_of_18": "suite/average",
    "box_ap": "detection/box_ap",
    "mask_ap": "detection/mask_ap",
    "miou": "segmentation/miou",
    "davis": "davis/J&F",
}
MOST = 6  # largest number of results in the line of a protocol
HEAD = ("Protocol", "Number", "Value", "Untrained", "Published", "Settings")
WORDS = {"~": r"\textasciitilde{}", "^": r"\^{}", "\\": r"\textbackslash{}"}
LATEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | WORDS)


# Values for the fields of a result that are unknown until its protocol has run.
NOT_RUN: Mapping[str, Any] = {"numbers": {}, "settings": {}, "data_digest": "", "date": "", "seconds": 0.0}


@dataclass(frozen=True)
class Result:
    """An entry of results.json: the numbers of a protocol, and the backbone, data and settings of the measurement."""

    protocol: str  # name in the command, such as linear@dino
    numbers: Mapping[str, float]
    settings: Mapping[str, Any]  # all settings used, and details such as the number of images
    backbone: str  # name in the command, with absolute paths
    untrained: bool
    backbone_digest: str
    architecture: str  # digest of the backbone without its weights
    data: Mapping[str, str]  # URLs and folders of the data, by option
    data_digest: str
    date: str  # ISO 8601, UTC
    seconds: float
    pictures: Sequence[str] = field(default_factory=tuple)  # paths relative to the folder of results.json
    asked: Mapping[str, Any] = field(default_factory=dict)  # settings that were given to the protocol, without defaults
    plugin: Mapping[str, str] | None = None  # name and sha256 of the plug-in that registered the protocol

    def twin(self, other: "Result") -> bool:
        """Return whether two results differ at most in the weights of the backbone."""
        return self._agrees(other, "protocol", "plugin", "architecture", "data_digest")

    def repeats(self, other: "Result") -> bool:
        """Return whether two results are of the same evaluation: the same protocol, settings, data and backbone."""
        return self._agrees(other, "protocol", "plugin", "untrained", "backbone_digest", "data")

    def _agrees(self, other: "Result", *names: str) -> bool:
        same = all(getattr(self, n) == getattr(other, n) for n in names)
        return same and json.dumps(self.asked, sort_keys=True) == json.dumps(other.asked, sort_keys=True)

    def before(self, known: "Sequence[Result]") -> Mapping[str, float]:
        """Return the numbers of the newest of the `known` results (oldest first) that has an untrained backbone, and
        the same protocol, architecture, data and settings; empty if there is none."""
        twins = [r for r in known if r.untrained and not self.untrained and r.twin(self)]
        return twins[-1].numbers if twins else {}


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as one line of text, without those whose value is a mapping."""
    texts = {k: "/".join(map(str, v)) if isinstance(v, list | tuple) else v for k, v in settings.items()}
    return ", ".join(f"{k} {v}" for k, v in texts.items() if not isinstance(v, Mapping))


def load(folder: str) -> list[Result]:
    """Return all results in the results.json of a folder or s3:// URL, oldest first.

    Raises UserError when the file is not a list of results."""
    try:
        return [Result(**r) for r in json.loads(run_store(folder).get(NAME) or "[]")]
    except (ValueError, TypeError) as e:
        why = " ".join(str(e).split())
        raise UserError(
            f"{folder}/{NAME}: expected a list of results written by eagleray ({why}); move or delete this file"
        ) from None


@contextlib.contextmanager
def picture_folder(folder: str, new: Result) -> Iterator[Path]:
    """A context with the local folder for the pictures of a new result, below that of results.json. Until it ends, an
    evaluation by another process of this machine gets another folder; if it is the same evaluation, it raises Busy.

    A repeated evaluation draws into its old folder. A new one gets the first of pictures, pictures/2, pictures/3 and so
    on in which its protocol has no pictures yet; for an untrained backbone these are in pictures/untrained."""
    base, same = PurePath(layout.PICTURES, *["untrained"] * new.untrained), (new.protocol, new.untrained)
    note = f" ({new.backbone_digest}: {format_settings({**new.data, **new.asked})})"
    for place in itertools.chain([base], (base / str(n) for n in itertools.count(2))):
        try:
            lock = lock_folder(run_store(folder).view, ".".join(("", *place.parts, new.protocol, "lock")), note=note)
        except Busy as e:
            if note in str(e):  # the same evaluation, whose training has the same checkpoints
                raise
            continue
        with lock:  # before the results are read, as the other evaluation adds its own while it has the lock
            others = [r for r in load(folder) if (r.protocol, r.untrained) == same and not r.repeats(new)]
            if place not in {PurePath(path).parent for r in others for path in r.pictures}:
                yield run_store(folder).view / place
                return


def add(folder: str, result: Result) -> None:
    """Append a result to the results.json of a folder or s3:// URL.

    Raises UserError when the file cannot be written, and Outage when the storage does not answer."""
    run = run_store(folder)
    with run.lock(NAME):
        text = json.dumps([asdict(r) for r in (*load(folder), result)], indent=1, default=str)
        with writing(f"{folder}/{NAME}"):
            run.put(NAME, text)


def published(command: Sequence[str], recipe: Mapping[str, Any]) -> dict[str, float]:
    """Return the published numbers of a shipped recipe, if its name is in the `command` of a run.

    `recipe` is the run's resolved recipe as a tree of plain values. If it differs from the shipped recipe outside of
    `data` in a key that changes the experiment, or `max_steps` ends the run, there are no published numbers."""
    name = next((word for word in command if word in bundled.recipes()), None)
    if name is None or recipe["max_steps"] or config.differences(_content(recipes.load(name)), _content(recipe)):
        return {}
    return published_numbers(bundled.recipe(name).published)


def _content(recipe: Recipe | Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in recipes.identity(recipe).items() if not k.startswith("data.")}


def published_numbers(published: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers in a recipe's `published` entries, under the names that protocols give them.

    Of several entries with the same metric, the first counts. Entries with a key `data` or `epochs` are left out, as
    they are for other data or another number of epochs."""
    own = [entry for entry in published if "data" not in entry and "epochs" not in entry]
    numbers = {metric: entry[metric] for entry in reversed(own) for metric in entry if metric in PUBLISHED}
    return {number: float(numbers[metric]) for metric, number in PUBLISHED.items() if metric in numbers}


class Row(NamedTuple):
    protocol: str
    number: str
    value: str
    untrained: str
    published: str
    settings: str


def rows(results: Sequence[Result], known: Sequence[Result], paper: Mapping[str, float]) -> Iterator[Row]:
    """Yield a table row for each number of the results, with the numbers of the untrained backbone and of the paper.

    Untrained numbers are from the newest of the `known` results that differs only in the weights. If `results` has a
    result both for the untrained and for the trained backbone, only the trained one gets a row."""
    for result in without_twins(results):
        before = result.before(known)
        name = result.protocol + (" (untrained)" if result.untrained else "")
        for key, value in result.numbers.items():
            untrained = format_number(before[key]) if key in before else ""
            published = format_number(paper[key]) if key in paper and not result.untrained else ""
            yield Row(name, key, format_number(value), untrained, published, format_settings(result.settings))


def without_twins(results: Sequence[Result]) -> list[Result]:
    """Return the results without those of an untrained backbone that `results` also has with trained weights."""
    trained = [r for r in results if not r.untrained]
    return [r for r in results if not r.untrained or not any(t.twin(r) for t in trained)]


def format_number(value: float) -> str:
    """Return a float with two decimals or, below 1, with four significant digits; an int as it is."""
    return str(value) if isinstance(value, int) else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4g}"


def lines(table: Sequence[Row]) -> str:
    """Return a line of text for each protocol: at most MOST numbers, each with the untrained and the published number
    if these are known. Numbers that vary another one, such as `top1_k10` of `top1`, are left out."""
    texts: list[tuple[str, str]] = []
    for name, group in itertools.groupby(table, key=lambda row: row.protocol):
        rows = {row.number.partition("/")[2] or row.number: row for row in group}
        main = {key: row for key, row in rows.items() if not any(key.startswith(f"{other}_") for other in rows)}
        shown = [f"{key} {row.value}{_beside(row)}" for key, row in itertools.islice(main.items(), MOST)]
        texts.append((name, ", ".join(shown) + f", and {len(main) - MOST} more" * (len(main) > MOST)))
    return "\n".join(aligned(texts))


def _beside(row: Row) -> str:
    """Return the untrained and the published number of a row in brackets, or "" if both are missing."""
    known = [f"{what} {value}" for what, value in (("untrained", row.untrained), ("paper", row.published)) if value]
    return f" ({', '.join(known)})" if known else ""


def markdown(table: Sequence[Row]) -> str:
    """Format rows as a Markdown table."""
    lines = [HEAD, ("---", "---", "---:", "---:", "---:", "---"), *table]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def latex(table: Sequence[Row]) -> str:
    """Format rows as a LaTeX tabular, which needs the booktabs package."""
    lines = [" & ".join(cell.translate(LATEX) for cell in line) + r" \\" for line in (HEAD, *table)]
    begin, end = [r"\begin{tabular}{llrrrp{6cm}}", r"\toprule"], [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*begin, lines[0], r"\midrule", *lines[1:], *end])


def table(results: Sequence[Result], rows: Sequence[Row], form: str) -> str:
    """Return results in a format: `json`, or their rows as `text` (see `lines`) or as a `latex` or `markdown` table."""
    if form == "text":
        return lines(rows)
    if form == "json":
        return json.dumps([r.__dict__ for r in results], indent=1, default=str)
    return latex(rows) if form == "latex" else markdown(rows)
