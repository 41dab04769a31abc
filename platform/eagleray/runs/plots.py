"""Draw a run's stability in one picture: loss, kNN accuracy, gradient norms and spread of features over the steps.

The picture follows figures 1 and 4 of Chen, Xie and He 2021, arXiv:2104.02057."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.base.files import read_history, read_metrics
from eagleray.base.plotting import BLUE, DPI, GREY, INK, LIGHT, RED
from eagleray.models.layer_names import HEADS, INPUT, TRUNK
from eagleray.runs import layout
from eagleray.runs.health import words
from eagleray.runs.metrics import AT_START, CLASSIFIER_TOP1, KNN_TOP1, LOSS, LR, MONITOR_KNN, UNTRAINED
from eagleray.runs.summary import read_summary

POINTS = 1000  # most points of a line, as there are no more pixels
FEW = 8  # number of points below which a line gets markers, as it is too short to see
WIDTH, LEFT, RIGHT, GAP = 10.0, 0.85, 2.1, 0.14  # inches: the page, left and right margins, space between panels
ROWS, ROW, LETTER = 4, 0.15, 0.07  # most rows of labels above the panels; inches of a row and of a letter's width
# Maps the keys of gradient norms that belong to no layer to the label, colour and style of their curves.
REST = {f"grad/{TRUNK}": ("rest of the trunk", GREY, ":"), f"grad/{HEADS}": ("heads", GREY, "--")}


class Line(NamedTuple):
    """A metric's curve, and how it is drawn."""

    key: str
    label: str
    colour: Any = INK
    style: str = "-"
    width: float = 1.2
    marker: str = ""


@dataclass(frozen=True)
class Panel:
    """One diagram of the picture, with the curves that share its axis."""

    title: str
    height: float  # inches
    lines: Sequence[Line]
    log: bool = False
    marks: str = ""  # kind of finding that a triangle marks on the lines
    right: Sequence[Line] = field(default=())  # lines with an axis of their own


TOP = (
    Panel("loss", 1.25, [Line(LOSS, "loss")], right=[Line(LR, "learning rate", GREY, "--")]),
    Panel(
        "kNN, top-1 %",
        1.25,
        [
            Line(MONITOR_KNN, "training crops", BLUE),
            Line(KNN_TOP1, "evaluation", INK, ":", marker="D"),
            Line(CLASSIFIER_TOP1, "classifier", INK, ":", marker="D"),  # for methods that learn from labels
        ],
        marks="kNN dip",
    ),
)
BOTTOM = (
    Panel(
        "spread",
        1.0,
        [Line("health/backbone_std", "backbone", BLUE), Line("health/projector_std", "projector", INK, "--")],
    ),
    Panel(
        "rank",
        1.0,
        [Line("health/backbone_rank", "backbone", BLUE), Line("health/projector_rank", "projector", INK, "--")],
    ),
    Panel("share of ln K", 1.0, [Line("entropy", "targets' entropy", BLUE), Line("usage", "usage", INK, "--")]),
    Panel("gain, nats", 1.0, [Line("gain", "gain over a guess", BLUE)]),
    Panel(
        "share of weights",
        1.1,
        [Line("health/update", "moved by a step", BLUE), Line("health/ema_distance", "from their copy", INK, "--")],
        log=True,
    ),
)


def draw(folder: Path) -> Path:
    """Write health.png from the metrics in a run's folder, and return its path. Raises UserError when there are
    none."""
    from matplotlib.figure import Figure

    curves, findings = read(folder), read_history(folder / layout.HEALTH)
    last = max(x[-1] for x, _ in curves.values())
    names = place(findings, last)
    panels = [p for p in (*TOP, gradients(curves), *BOTTOM) if any(line.key in curves for line in p.lines)]
    head = 0.4 + ROW * len({name.row for name in names})
    height = head + sum(p.height + GAP for p in panels) + 0.4
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    left, width, bottom = LEFT / WIDTH, 1 - (LEFT + RIGHT) / WIDTH, height - head
    looks = len(curves.get("health/update", ([],))[0])
    found = words(findings) + f" in {looks} measurements" * (not findings)
    title = shorten(f"{folder.resolve().name}: {found}", 110, placeholder=" ...")
    figure.text(left, 1 - 0.2 / height, title, fontsize=10, color=INK, va="center")
    for panel in panels:
        bottom -= panel.height
        axes = figure.add_axes((left, bottom / height, width, panel.height / height))
        bottom -= GAP
        axes.set_xlim(-0.005 * last, 1.005 * last)
        if panel is panels[0]:
            _write(axes, names, panel.height)
        axes.legend(
            handles=fill(axes, panel, curves),
            loc="upper left",
            bbox_to_anchor=(1.08, 1.04),
            frameon=False,
            fontsize=8,
            handlelength=2.4,
        )
        axes.set_ylabel(panel.title, fontsize=9)
        axes.yaxis.set_label_coords(-0.085, 0.5)
        mark(axes, panel, curves, findings)
        axes.tick_params(labelbottom=panel is panels[-1])
    axes.set_xlabel("step", fontsize=9)
    figure.savefig(path := folder / layout.HEALTH_PLOT)
    return path


Curve = tuple[NDArray[np.float64], NDArray[np.float64]]  # steps, values


def read(folder: Path) -> dict[str, Curve]:
    """Return steps and values of every metric in a run's folder, by key. The scores of the final evaluation are added
    from the summary, and at step 0 those of the backbone that the run started from or, if there was none, of an
    untrained one. Raises UserError when there is no metrics.jsonl."""
    records = read_metrics(folder / layout.METRICS)
    if not records:
        raise UserError(f"{folder}: metrics.jsonl is missing or empty")
    done = read_summary(folder)
    if "steps" in done:
        begin = AT_START if KNN_TOP1 + AT_START in done else UNTRAINED
        ends = ((0, KNN_TOP1, begin), (done["steps"], KNN_TOP1, ""), (done["steps"], CLASSIFIER_TOP1, ""))
        found = [{"step": n, key: done[key + suffix]} if key + suffix in done else {} for n, key, suffix in ends]
        records = sorted((r for r in (found[0], *records, *found[1:]) if r), key=lambda r: r["step"])
    columns: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for record in records:
        for key, value in record.items():
            steps, values = columns[key]
            steps.append(record["step"])
            values.append(value)
    pairs = {key: np.array(column, dtype=float) for key, column in columns.items()}
    finite = {key: pair[:, np.isfinite(pair[1])] for key, pair in pairs.items()}
    return {key: thin(x, y) for key, (x, y) in finite.items() if len(x)}


def thin(x: NDArray[np.float64], y: NDArray[np.float64], points: int = POINTS) -> Curve:
    """Return at most `points` points of a curve: the lowest and the highest of each stretch, so that spikes and dips
    remain visible."""
    if len(x) <= points:
        return x, y
    edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
    stretches = list(itertools.pairwise(edges))
    kept = np.unique([a + f(y[a:b]) for f in (np.argmin, np.argmax) for a, b in stretches])
    return x[kept], y[kept]


def gradients(curves: Mapping[str, Curve]) -> Panel:
    """Return the panel with a line for each layer's gradient norm, from dark to light with depth. The patch
    projection is red."""
    from matplotlib import colormaps

    layers = [key.removeprefix("grad/") for key in curves if key.startswith("grad/")]
    inner = [name for name in layers if name not in (*INPUT, TRUNK, HEADS)]
    shades = colormaps["viridis"](np.linspace(0.05, 0.8, max(len(inner), 1)))
    named = set(inner if len(inner) <= 6 else [inner[0], inner[len(inner) // 2], inner[-1]])
    lines = [Line(f"grad/{n}", n if n in named else "", c, width=1.0) for n, c in zip(inner, shades, strict=False)]
    lines = [Line(f"grad/{n}", n, RED, width=1.8) for n in layers if n in INPUT] + lines
    lines += [Line(key, *look) for key, look in REST.items() if key in curves]
    return Panel("gradient norm", 2.1, lines, log=True, marks="spike")


class Name(NamedTuple):
    """The label of a finding above the first panel, written from its step to the right, in a row counted from below."""

    step: int
    text: str
    row: int


def place(findings: Sequence[Mapping[str, Any]], last: float) -> list[Name]:
    """Return labels of findings that do not overlap. Where there is no room for all, the first finding of each kind
    has priority."""
    kinds = [f["kind"] for f in findings]
    order = sorted(range(len(findings)), key=lambda i: kinds[:i].count(kinds[i]))
    names: list[Name] = []
    for f in (findings[i] for i in order[:100]):
        layer = re.search(r"first in ([\w.]+)", f["text"])
        name = Name(f["step"], f["kind"] + (f", first in {layer[1]}" if layer else ""), 0)
        tried = in_rows([*names, name], LETTER * last / (WIDTH - LEFT - RIGHT))
        names = tried if all(n.row < ROWS for n in tried) else names
    return names


def in_rows(names: Sequence[Name], letter: float) -> list[Name]:
    """Return the labels, each in the lowest row where it fits and where the line from its step crosses no other
    label. Labels are set from right to left. `letter` is the width of a letter in steps."""
    placed: list[Name] = []
    starts: list[float] = []  # step at which the leftmost label of each row starts, from the lowest row up
    for n in sorted(names, reverse=True):
        end = n.step + letter * (len(n.text) + 1)
        row = next((i for i in range(len(starts)) if end < min(starts[i:])), len(starts))
        starts[row : row + 1] = [n.step]
        placed.append(n._replace(row=row))
    return placed


def _write(axes: Any, names: Sequence[Name], height: float) -> None:
    """Draw the labels of findings above a panel."""
    steps_up = axes.get_xaxis_transform()  # x in steps, y in heights of the panel
    for n in names:
        y = 1 + (0.04 + ROW * n.row) / height
        axes.vlines(n.step, 1, y + 0.1 / height, transform=steps_up, color=RED, linewidth=0.7, clip_on=False)
        where = {"xycoords": steps_up, "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(n.text, (n.step, y), (3, 0), fontsize=8, color=RED, **where)


def fill(axes: Any, panel: Panel, curves: Mapping[str, Curve]) -> list[Any]:
    """Draw the lines of a panel, and return those that have a name for the legend."""
    sides = [(axes, panel.lines)]
    if panel.right:
        sides += [(axes.twinx(), panel.right)]
    shown = [line for side, lines in sides for line in _plot(side, lines, curves)]
    if panel.log and any((line.get_ydata() > 0).any() for line in shown):
        axes.set_yscale("log")
    axes.margins(y=0.1)
    axes.set_zorder(1)  # above the lines of the right axis, which are less important
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(color=LIGHT, linewidth=0.6)
    for side, _ in sides:
        side.tick_params(labelsize=8, length=2, color=GREY, which="both")
        side.spines[:].set_color(LIGHT)
    return [line for line in shown if not line.get_label().startswith("_")]


def _plot(axes: Any, lines: Sequence[Line], curves: Mapping[str, Curve]) -> Iterator[Any]:
    """Draw lines on one axis, and yield them."""
    for line in lines:
        if line.key in curves:
            x, y = curves[line.key]
            [drawn] = axes.plot(x, y, line.style, color=line.colour, linewidth=line.width, label=line.label or "_")
            drawn.set(marker=line.marker or ("." if len(x) < FEW else ""), markersize=4, clip_on=not line.marker)
            yield drawn


def mark(axes: Any, panel: Panel, curves: Mapping[str, Curve], findings: Sequence[Mapping[str, Any]]) -> None:
    """Draw a vertical line at the step of every finding. A triangle marks a finding that the panel itself shows:
    above a spike, below a dip."""
    steps = [f["step"] for f in findings]
    axes.vlines(steps, 0, 1, transform=axes.get_xaxis_transform(), color=RED, linewidth=0.7, alpha=0.6, zorder=0.5)
    shown = [curves[line.key] for line in panel.lines if line.key in curves and not line.marker]
    for step in (f["step"] for f in findings if f["kind"] == panel.marks):
        now = [y[np.searchsorted(x, step)] for x, y in shown if x[-1] >= step]
        if now:
            value, marker = (min(now), "^") if panel.marks == "kNN dip" else (max(now), "v")
            axes.plot(step, value, marker, color=RED, markersize=6, clip_on=False)
