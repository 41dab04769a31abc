"""Draw plots of a sweep: the objective over each key, all keys in parallel, the objective over the steps, and the best
trial of each alternative."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagleray.base.plotting import BLUE, DPI, GREY, INK, RED
from eagleray.sweeps.live_table import short
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import RANGES, in_words

COLOURS = (BLUE, RED, "#4a8c3f", "#c27c0e", "#7a5195", "#2a9d8f", "#8c564b", "#555555")  # colours of alternatives
MARKS = {"finished": "o", "stopped": "v", "running": ".", "waiting": "."}
COLUMNS = 4  # largest number of panels in a row
NAMED = 12  # largest number of curves that are labelled; if there are more, only the best one is
PAPER = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}


def draw(study: Study) -> list[Path]:
    """Write keys.png, parallel.png, curves.png and, for several alternatives, alternatives.png into the sweep's folder,
    and return their paths. Draws nothing while no trial has a result."""
    rows = [r for r in study.rows.values() if r["metric"] is not None]
    if not rows:
        return []
    names = list(study.sweep.alternatives)
    colours = {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(names)}
    drawn = [keys(study, rows, colours), parallel(study, rows, colours), curves(study, colours)]
    return drawn + ([alternatives(study, rows, colours)] if len(names) > 1 else [])


def keys(study: Study, rows: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> Path:
    """Draw one panel for each key: every trial is a point, with the key's value on x and the objective on y."""
    from matplotlib.figure import Figure

    varied = drawn_keys(study, rows)
    columns = min(len(varied), COLUMNS)
    lines = math.ceil(len(varied) / columns)
    width = max(3.0 * columns + 0.6, 6.0)
    figure = Figure(figsize=(width, 2.7 * lines + 0.8), dpi=DPI, layout="constrained")
    figure.suptitle(title(study), fontsize=10, color=INK, x=0.01, ha="left")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in axes.flat[len(varied) :]:
        panel.set_visible(False)
    for panel, key in zip(axes.flat, varied, strict=False):
        scale = Scale([r["values"][key] for r in rows if key in r["values"]], kinds(study)[key])
        for row in rows:
            if key in row["values"]:
                done = row["state"] == "finished"
                colour = colours[row["alternative"]]
                panel.plot(
                    scale.at(row["values"][key]),
                    row["metric"],
                    MARKS.get(row["state"], "."),
                    color=colour,
                    markerfacecolor=colour if done else "none",
                    markersize=6,
                )
        scale.label(panel)
        panel.set_xlabel(key, fontsize=9)
        panel.tick_params(labelsize=8)
        if panel.get_subplotspec().is_first_col():
            panel.set_ylabel(study.sweep.objective.key, fontsize=9)
    legend(figure, study, colours)
    return save(figure, study.folder / "keys.png")


def parallel(study: Study, rows: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> Path:
    """Draw one line per trial across parallel axes, one axis per key; darker lines are better trials. A line is dotted
    across the axis of a key that the trial's alternative lacks."""
    from matplotlib.figure import Figure

    columns = [*drawn_keys(study, rows), study.sweep.objective.key]
    several = len(study.sweep.alternatives) > 1
    columns = ["alternative", *columns] if several else columns
    table = [{**r["values"], "alternative": r["alternative"], study.sweep.objective.key: r["metric"]} for r in rows]
    scales = {c: Scale([t[c] for t in table if c in t], kinds(study).get(c, "uniform")) for c in columns}
    figure = Figure(figsize=(max(1.7 * len(columns), 6.0), 4.4), dpi=DPI, layout="constrained")
    figure.suptitle(title(study), fontsize=10, color=INK, x=0.01, ha="left")
    axes = figure.subplots()
    order = sorted(range(len(rows)), key=lambda i: rows[i]["metric"], reverse=study.sweep.objective.mode == "min")
    for rank, i in enumerate(order):
        at = [(x, scales[c].share(table[i][c])) for x, c in enumerate(columns) if c in table[i]]
        strength = 0.2 + 0.8 * rank / max(len(order) - 1, 1)
        colour = colours[rows[i]["alternative"]]
        for one, other in itertools.pairwise(at):
            style = "-" if other[0] == one[0] + 1 else ":"
            look: dict[str, Any] = {"color": colour, "alpha": min(strength, 1.0), "linewidth": 0.8 + 1.6 * strength}
            axes.plot((one[0], other[0]), (one[1], other[1]), style, **look)
    for x, c in enumerate(columns):
        axes.axvline(x, color=GREY, linewidth=0.8, zorder=0)
        for y, text in scales[c].ticks():
            axes.text(x + 0.03, y, text, fontsize=7.5, color=INK, va="center", bbox=PAPER)
    axes.set_xticks(range(len(columns)), [c.replace(".", ".\n").replace("/", "/\n") for c in columns], fontsize=8.5)
    axes.set_xlim(-0.1, len(columns) - 0.55)
    axes.set_ylim(-0.06, 1.06)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    return save(figure, study.folder / "parallel.png")


def curves(study: Study, colours: Mapping[str, str]) -> Path:
    """Draw the objective of every trial over the share of its steps that are done, as reported to the scheduler."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.4), dpi=DPI, layout="constrained")
    figure.suptitle(title(study), fontsize=10, color=INK, x=0.01, ha="left")
    axes = figure.subplots()
    best = study.best()
    for name, reports in study.reports.items():
        row = study.rows[name]
        chosen = best is not None and best["id"] == name
        x, y = [r["percent"] for r in reports], [r["value"] for r in reports]
        colour = colours[row["alternative"]]
        axes.plot(x, y, color=colour, linewidth=2.2 if chosen else 1.0, alpha=1.0 if chosen else 0.6)
        fill = colour if row["state"] == "finished" else "white"
        axes.plot(x[-1], y[-1], MARKS.get(row["state"], "."), color=colour, markerfacecolor=fill, markersize=6)
        if chosen or len(study.reports) <= NAMED:
            axes.annotate(name, (x[-1], y[-1]), xytext=(5, 0), textcoords="offset points", fontsize=7.5, va="center")
    axes.set_xlabel("% of a trial's steps", fontsize=9)
    axes.set_ylabel(study.sweep.objective.key, fontsize=9)
    axes.set_xlim(0, 105)
    axes.tick_params(labelsize=8)
    legend(figure, study, colours)
    return save(figure, study.folder / "curves.png")


def alternatives(study: Study, rows: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> Path:
    """Draw a row for each alternative, the best one on top. Its trials are points with the objective on x, hollow if
    they were stopped early. Text above them gives the objective and the values of its best trial."""
    from matplotlib.figure import Figure

    each = study.best_of_each()
    figure = Figure(figsize=(9.0, 0.75 * len(each) + 1.4), dpi=DPI, layout="constrained")
    figure.suptitle(title(study), fontsize=10, color=INK, x=0.01, ha="left")
    axes = figure.subplots()
    titles = dict(zip(study.keys(), short(study.keys()), strict=True))
    for y, one in enumerate(each):
        colour = colours[one["alternative"]]
        for row in [r for r in rows if r["alternative"] == one["alternative"]]:
            done = row["state"] == "finished"
            chosen = row["id"] == one["id"]
            look: dict[str, Any] = {"color": colour, "markerfacecolor": colour if done else "none"}
            look |= {"alpha": 1.0 if chosen else 0.45, "markersize": 10 if chosen else 6}
            axes.plot(row["metric"], y, MARKS.get(row["state"], "."), **look)
        settings = "  ".join(f"{titles[k]} {in_words(v)}" for k, v in one["values"].items())
        reached = "no trial took all its steps" if one["metric"] is None else f"{one['metric']:.4g}: {settings}"
        beside = axes.get_yaxis_transform()  # x as a share of the panel's width, y in data coordinates
        axes.text(0.01, y - 0.3, reached, transform=beside, fontsize=7.5, va="center", color=INK)
    names = [f"{one['alternative']}\n{one['finished']} of {one['trials']} done" for one in each]
    axes.set_yticks(range(len(each)), names)
    axes.set_ylim(len(each) - 0.5, -0.6)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color=GREY, alpha=0.3)
    axes.set_xlabel(study.sweep.objective.key, fontsize=9)
    legend(figure, study, {})
    return save(figure, study.folder / "alternatives.png")


def drawn_keys(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that vary in the alternative of at least one trial with a result."""
    varied = study.keys()
    return [key for key in varied if any(key in r["values"] for r in rows)]


def kinds(study: Study) -> dict[str, str]:
    """Return the kind of each key, such as log or choice. A key that has a range in one alternative and a list in
    another gets the kind of the list."""
    kinds = [(k, v.kind) for b in study.sweep.alternatives.values() for k, v in b.space.items()]
    return dict(sorted(kinds, key=lambda kind: kind[1] not in RANGES))


class Scale:
    """Maps a key's values to positions on an axis: linear or logarithmic for a range, equally spaced for a list."""

    def __init__(self, values: Sequence[Any], kind: str) -> None:
        """`kind` is the kind of the key in the sweep file, such as log or choice."""
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        self.range = numbers and kind in RANGES
        # Values are told apart by repr: mappings and lists have no hash, and True equals 1.
        distinct = set(values) if numbers else {repr(v): v for v in values}.values()
        self.values: list[Any] = sorted(distinct, key=None if numbers else str)
        self.places = {repr(v): i for i, v in enumerate(self.values)}
        self.log = self.range and kind == "log"

    def at(self, value: Any) -> float:
        """Return the data coordinate of a value: the value itself or, for a list, its index."""
        if self.range:
            return float(value)
        return (
            self.places[repr(value)] if repr(value) in self.places else self.values.index(value)
        )  # 1 and 1.0 are equal, but differ in repr

    def share(self, value: Any) -> float:
        """Return the position of a value on an axis, from 0 for the lowest to 1 for the highest value."""
        low, high, x = (float(self.at(v)) for v in (self.values[0], self.values[-1], value))
        if self.log:
            low, high, x = math.log(low), math.log(high), math.log(x)
        return (x - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions from 0 to 1, each with its text: the ends of a range, or all values of a list."""
        ends = dict.fromkeys((self.values[0], self.values[-1])) if self.range else self.values
        return [(self.share(v), in_words(v)) for v in ends]

    def label(self, axes: Any) -> None:
        """Set the scale and the ticks of the horizontal axis."""
        if self.log:
            axes.set_xscale("log")
        elif not self.range:
            axes.set_xticks(range(len(self.values)), [in_words(v) for v in self.values])
            axes.set_xlim(-0.5, len(self.values) - 0.5)


def legend(figure: Any, study: Study, colours: Mapping[str, str]) -> None:
    """Draw a legend of the alternatives, if there are several, and of the markers of finished and stopped trials."""
    from matplotlib.lines import Line2D

    several = len(colours) > 1
    marks = [Line2D([], [], color=c, marker="o", linestyle="", label=n) for n, c in colours.items()] if several else []
    states = {r["state"] for r in study.rows.values() if r["metric"] is not None}
    for state, text in ("finished", "all its steps"), ("stopped", "stopped early"):
        fill = GREY if state == "finished" else "none"
        if state in states:
            marker = MARKS[state]
            marks.append(Line2D([], [], color=GREY, marker=marker, markerfacecolor=fill, linestyle="", label=text))
    figure.legend(handles=marks, loc="outside right upper", fontsize=8, frameon=False)


def title(study: Study) -> str:
    """Return the title of a picture: the sweep and its best trial."""
    best = study.best()
    text = f"{study.name}: {len(study.rows)} trials"
    return text + (f", best {best['id']} with {study.sweep.objective.key} {best['metric']:.4g}" if best else "")


def save(figure: Any, path: Path) -> Path:
    """Write a figure into a file, and return the path."""
    figure.savefig(path)
    return path
