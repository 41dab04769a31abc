"""Draw the curves of one run or of several runs together: a figure for each panel, small enough for a phone."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagleray.base.plotting import BLUE, GREY, LIGHT, RED
from eagleray.reports.page import Picture, uri
from eagleray.reports.read import Run
from eagleray.runs import metrics
from eagleray.runs.metrics import METRICS
from eagleray.runs.plots import BOTTOM, REST, TOP, Curve, Line, Panel, fill, gradients, mark, thin

SIZE = (4.6, 2.9)  # width and height of a figure in inches
DPI = 200  # above base.plotting.DPI, because pages are also printed and read on phones
POINTS = 600  # largest number of points of a line
COLOURS = (BLUE, RED, "#3f7d33", "#b36f00", "#7a5195", "#1f7f76", "#8c564b", "#444444")
STYLES = ("-", "--", ":", "-.")
MOST = len(COLOURS) * len(STYLES)  # largest number of runs whose curves can be told apart

SPEED = Panel(
    "images/s",
    1.25,
    [Line(metrics.IMAGES_PER_S, "images a second", BLUE)],
    right=[Line(metrics.DATA_WAIT, "share of time waiting", GREY, "--")],
)
GOODPUT = Panel("goodput", 1.0, [Line(metrics.GOODPUT, "goodput so far", BLUE)])
# Maps the title of a panel to an explanation for readers who are new to it.
EXPLAINED = {
    "loss": "Loss, and the learning rate on an axis of its own.",
    "kNN, top-1 %": "How often an image is classified correctly by its nearest neighbours: among all training images "
    "(evaluation), or among the images of the last steps (monitor), which are fewer.",
    "gradient norm": "The gradient's norm of each layer before clipping: the largest between two measurements.",
    "spread": "How far features point in different directions: 1 where they are random, 0 where all are the same.",
    "rank": "The number of directions in which features differ (effective rank).",
    "share of ln K": "Entropy of the targets and usage of the prototypes: 1 is uniform; a usage near 0 is a collapse.",
    "gain, nats": "How much better than a guess the contrastive task is solved: 0 is a guess.",
    "share of weights": "How far a step moves the weights, and how far the momentum copy lags behind.",
    "images/s": "Speed over all workers, and the share of the time spent waiting for data.",
    "goodput": "The share of all time since the first start that went into steps that count.",
}
# Key and label of each metric that is drawn for several runs, and whether its axis is logarithmic.
COMPARED = [(m.key, m.label, m.log_axis) for m in METRICS.values() if m.compared]
STABILITY = (metrics.MONITOR_KNN, metrics.KNN_TOP1, metrics.LOSS, metrics.GRAD_NORM)


class Point(NamedTuple):
    """A run as a point in a plot of accuracy over cost."""

    run: str
    group: str  # the method, whose runs are joined by a line
    x: float
    y: float


def curves(run: Run, folder: Path) -> list[Picture]:
    """Return one picture for each panel of a run, and write each to a folder as a PNG."""
    points = {key: thin(x, y, POINTS) for key, (x, y) in run.curves.items()}
    panels = [*TOP, gradients(points), *BOTTOM, SPEED, *[GOODPUT] * (len(run.starts) > 1)]
    shown = [p for p in panels if any(line.key in points for line in p.lines)]
    return [draw_panel(p, points, EXPLAINED[p.title], folder, findings=run.findings) for p in shown]


def compared(runs: Mapping[str, Run], folder: Path, *, epochs: bool) -> list[Picture]:
    """Return a picture for each metric of COMPARED, in which every run is a curve over steps (over epochs if `epochs`),
    and the picture of `first_and_last`."""
    return [*overlays(runs, COMPARED, folder, epochs=epochs), *first_and_last(runs, folder, epochs=epochs)]


def stability(runs: Mapping[str, Run], folder: Path, *, epochs: bool) -> list[Picture]:
    """Return the curves that show whether the trials of a sweep are stable: kNN accuracy, loss and gradient norm (MoCo
    v3, figures 1 to 5)."""
    shown = [entry for entry in COMPARED if entry[0] in STABILITY]
    return [*overlays(runs, shown, folder, epochs=epochs), *first_and_last(runs, folder, epochs=epochs)]


def overlays(
    runs: Mapping[str, Run], shown: Sequence[tuple[str, str, bool]], folder: Path, *, epochs: bool
) -> Iterator[Picture]:
    """Yield a picture of each metric in `shown`, such as COMPARED, with the curves of all runs that have the metric."""
    for key, title, log in shown:
        points, lines = {}, []
        for i, (name, run) in enumerate(runs.items()):
            if key in run.curves:
                points[name] = curve(run, key, epochs=epochs)
                lines.append(Line(name, label(name), COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS)]))
        if lines:
            panel = Panel(title, SIZE[1], lines, log=log)
            yield draw_panel(panel, points, "", folder, x="epoch" if epochs else "step")


def first_and_last(runs: Mapping[str, Run], folder: Path, *, epochs: bool) -> list[Picture]:
    """Return a picture with the gradient norms of the first layer and the last block of each run that has logged them
    (MoCo v3, figure 4). If there are more runs than colours, return an empty list."""
    points, lines, names = {}, [], list[tuple[str, str]]()
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        layers = [key for key in run.curves if key.startswith("grad/") and key not in REST]
        if len(layers) > 1:
            names.append((layers[0].removeprefix("grad/"), layers[-1].removeprefix("grad/")))
            looks = (label(name), "-", 1.2), ("", ":", 1.5)
            for layer, (text, style, width) in zip((layers[0], layers[-1]), looks, strict=True):
                points[f"{name} {layer}"] = curve(run, layer, epochs=epochs)
                lines.append(Line(f"{name} {layer}", text, colour, style, width))
    if not lines or len(runs) > len(COLOURS):
        return []
    first, last = (" or ".join(dict.fromkeys(ends)) for ends in zip(*names, strict=True))
    caption = f"Gradient norm of the first layer ({first}, solid) and of the last ({last}, dotted)."
    panel = Panel("gradient norm, first and last layer", SIZE[1], lines, log=True)
    return [draw_panel(panel, points, caption, folder, x="epoch" if epochs else "step")]


def curve(run: Run, key: str, *, epochs: bool) -> Curve:
    """Return the curve of a metric of a run over steps or, if `epochs`, over epochs."""
    x, y = thin(*run.curves[key], POINTS)
    return x * _epochs(run) if epochs else x, y


def label(name: str) -> str:
    """Return a name with escaped `$`, so that matplotlib shows it unchanged."""
    return name.replace("$", r"\$")


def _epochs(run: Run) -> float:
    """Return the length of a step in epochs, from the last record; 0 if this is unknown."""
    last = run.records[-1] if run.records else {}
    return float(last.get("epoch", 0) / last["step"]) if last.get("step") else 0.0


def draw_panel(
    panel: Panel,
    curves: Mapping[str, Curve],
    caption: str,
    folder: Path,
    *,
    findings: Sequence[Mapping[str, Any]] = (),
    x: str = "step",
) -> Picture:
    """Draw the curves of a panel, write them to `folder` as a PNG, and return them as an SVG picture for the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    handles = fill(axes, panel, curves)
    mark(axes, panel, curves, findings)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(panel.title, fontsize=9)
    for right in figure.axes[1:]:
        right.set_ylabel(panel.right[0].label, fontsize=9)
    figure.legend(
        handles=handles, ncols=_columns(handles), loc="outside upper left", frameon=False, fontsize=8, handlelength=2
    )
    return as_picture(figure, panel.title, in_words(panel, curves, x), caption, folder)


def as_picture(figure: Any, title: str, words: str, caption: str, folder: Path) -> Picture:
    """Write a figure to `folder` as a PNG named after its title, and return it as an SVG picture for the page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    name = re.sub(r"\W+", "-", title).strip("-")
    # Figure.savefig would draw everything twice, the first time only to measure it.
    FigureCanvasAgg(figure).print_png(folder / f"{name}.png")
    figure.set_layout_engine("none")  # the layout is computed already
    with rc_context({"svg.hashsalt": "eagleray"}):
        FigureCanvasSVG(figure).print_svg(buffer := io.BytesIO(), metadata={"Date": None})
    return Picture(uri(buffer.getvalue(), "svg+xml"), words, caption)


def scatter(points: Sequence[Point], xlabel: str, ylabel: str, heading: str, folder: Path) -> Picture:
    """Draw accuracy over cost: a point with a name for each run, and a line through the runs of each method."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for i, group in enumerate(dict.fromkeys(p.group for p in points)):
        of = sorted((p for p in points if p.group == group), key=lambda p: p.x)
        axes.plot([p.x for p in of], [p.y for p in of], "o-", color=COLOURS[i % len(COLOURS)], label=group, lw=1, ms=4)
        for p in of:
            left = p.x == max(q.x for q in points)  # right of the point, the name would not fit
            place: Any = {"xytext": (-4, -10), "ha": "right"} if left else {"xytext": (4, 4)}
            axes.annotate(label(p.run), (p.x, p.y), textcoords="offset points", fontsize=7, **place)
    if max(p.x for p in points) > 4 * min(p.x for p in points):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(0.2)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.tick_params(labelsize=8, length=2, color=GREY, which="both")
    axes.spines[:].set_color(LIGHT)
    axes.grid(color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)
    title = f"{ylabel} over {xlabel}"
    words = "; ".join(f"{p.run} ({p.group}) {p.y:.4g} at {p.x:.4g}" for p in points)
    return as_picture(figure, title, f"{title}: {words}", heading, folder)


def _columns(handles: Sequence[Any]) -> int:
    """Return the number of columns of a legend with these handles that fit side by side."""
    longest = max((len(h.get_label()) for h in handles), default=1)
    return max(1, min(len(handles), 56 // (longest + 6)))


def in_words(panel: Panel, curves: Mapping[str, Curve], x: str) -> str:
    """Return the first and the last value of each curve in words, for readers who cannot see the picture."""
    sentences = []
    for line in (*panel.lines, *panel.right):
        if line.label and line.key in curves:
            xs, ys = curves[line.key]
            sentences.append(f"{line.label} from {ys[0]:.4g} at {x} {xs[0]:.4g} to {ys[-1]:.4g} at {x} {xs[-1]:.4g}")
    return f"{panel.title}: " + "; ".join(sentences)
