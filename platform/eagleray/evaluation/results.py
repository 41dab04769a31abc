"""Store every result with its settings, backbone, data and date in results.json, which only grows, and print tables
with the untrained backbone's and the published numbers."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.base.files import file_lock
from eagleray.config import bundled
from eagleray.runs import layout, remote
from eagleray.runs import recipe as recipes
from eagleray.runs.recipe import Recipe
from eagleray.storage.store import is_remote

NAME = layout.RESULTS
UNTRAINED = "untrained:"  # before the name of a backbone
# The metrics of `published` in a recipe, and which number of ours each of them is.
PUBLISHED = {
    "knn": "knn/top1",
    "linear": "linear/top1",
    "average_of_18": "suite/average",
    "box_ap": "detection/box_ap",
    "mask_ap": "detection/mask_ap",
    "miou": "segmentation/miou",
    "davis": "davis/J&F",
}
HEAD = ("Protocol", "Number", "Value", "Untrained", "Published", "Settings")
WORDS = {"~": r"\textasciitilde{}", "^": r"\^{}", "\\": r"\textbackslash{}"}
LATEX = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | WORDS)


@dataclass(frozen=True)
class Result:
    """The outcome of a protocol, with its backbone and data."""

    protocol: str  # as it was asked for, such as linear@dino
    numbers: Mapping[str, float]
    settings: Mapping[str, Any]  # all of them, and what was found on the way
    backbone: str  # as it was named
    untrained: bool
    backbone_digest: str
    architecture: str  # digest of all but the weights
    data: Mapping[str, str]  # what the protocol was given, by option
    data_digest: str
    date: str  # ISO 8601, UTC
    seconds: float
    pictures: Sequence[str] = field(default_factory=tuple)  # relative to the folder of results.json
    asked: Mapping[str, Any] = field(default_factory=dict)  # settings that the recipe or the command line gave

    def twin(self, other: "Result") -> bool:
        """Whether the other result differs in nothing but the weights."""
        names = ("protocol", "architecture", "data_digest")
        same = all(getattr(self, n) == getattr(other, n) for n in names)
        return same and json.dumps(self.asked, sort_keys=True) == json.dumps(other.asked, sort_keys=True)

    def before(self, known: "Sequence[Result]") -> Mapping[str, float]:
        """Return the numbers of the newest untrained twin among the known results, which are ordered by age; empty if
        there is none."""
        twins = [r for r in known if r.untrained and not self.untrained and r.twin(self)]
        return twins[-1].numbers if twins else {}


def settled(settings: Mapping[str, Any]) -> str:
    """Write settings as words, without those that are tables."""
    said = {k: "/".join(map(str, v)) if isinstance(v, list | tuple) else v for k, v in settings.items()}
    return ", ".join(f"{k} {v}" for k, v in said.items() if not isinstance(v, Mapping))


def load(folder: str) -> list[Result]:
    """Load all results of a folder or s3:// URL, oldest first.

    Raises UserError when the file is not a list of results."""
    text = remote.get(folder, NAME)
    try:
        return [Result(**r) for r in json.loads(text or "[]")]
    except (ValueError, TypeError) as e:
        why = " ".join(str(e).split())
        raise UserError(f"{folder}/{NAME}: is not a list of results ({why}); move it out of the way") from None


def add(folder: str, result: Result) -> None:
    """Append a result to the file. Raises UserError and Outage."""
    # A store has no locks.
    with contextlib.nullcontext() if is_remote(folder) else file_lock(Path(folder) / f".{NAME}.lock"):
        text = json.dumps([asdict(r) for r in (*load(folder), result)], indent=1, default=str)
        try:
            remote.put(folder, NAME, text)
        except OSError as e:
            raise UserError(f"{folder}/{NAME}: cannot be written: {e.strerror or e}") from None


def published(command: Sequence[str], recipe: Mapping[str, Any]) -> dict[str, float]:
    """Return what was published for the shipped recipe that a run's command names. It is empty where the run's own
    recipe, a plain tree, differs in more than where the data lies and how it is read."""
    name = next((word for word in command if word in bundled.recipes()), None)
    if name is None or config.differences(_content(recipes.load(name)), _content(recipe)):
        return {}
    return printed(bundled.recipe(name).published)


def _content(recipe: Recipe | Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in recipes.identity(recipe).items() if not k.startswith("data.")}


def printed(published: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the published numbers of a recipe by our names, the first of each. Those of other data or of another
    length are left out."""
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
    """One for each number of the results, beside that of the newest twin without training among the `known`. A twin
    that stands beside another result has no row of its own."""
    for result in lone(results):
        before = result.before(known)
        name = result.protocol + (" (untrained)" if result.untrained else "")
        for key, value in result.numbers.items():
            bare = shown(before[key]) if key in before else ""
            there = shown(paper[key]) if key in paper and not result.untrained else ""
            yield Row(name, key, shown(value), bare, there, settled(result.settings))


def lone(results: Sequence[Result]) -> list[Result]:
    """Return the results that are not the untrained twin of another."""
    trained = [r for r in results if not r.untrained]
    return [r for r in results if not r.untrained or not any(t.twin(r) for t in trained)]


def shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4g}"


def markdown(table: Sequence[Row]) -> str:
    lines = [HEAD, ("---", "---", "---:", "---:", "---:", "---"), *table]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def latex(table: Sequence[Row]) -> str:
    """A tabular for the booktabs package."""
    lines = [" & ".join(cell.translate(LATEX) for cell in line) + r" \\" for line in (HEAD, *table)]
    begin, end = [r"\begin{tabular}{llrrrp{6cm}}", r"\toprule"], [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*begin, lines[0], r"\midrule", *lines[1:], *end])
