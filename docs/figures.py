#!/usr/bin/env python
"""Draws the figures of docs/concepts/: the order of samples as data/order.py has it, the time of a run, the rooms."""

import ast
import hashlib
import re
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from eagleray.base.plotting import BLUE, DPI, GREY, INK, LIGHT, RED
from eagleray.data.order import Epoch

IMAGES = Path(__file__).with_name("images")
SOURCE = Path(__file__).parents[1] / "platform" / "eagleray"
SHARDS = ("#3b6ea5", "#7fa7cf", "#c9924b", "#6b8f5e")  # one colour for each shard of the figure of lanes
NOTE = "Source"  # the metadata of the picture of rooms that says what it was drawn from

matplotlib.use("agg")
plt.rcParams.update({"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "figure.dpi": DPI})


# Lanes

BLOCKS, LANES, BATCH, STEPS = (6, 6, 6, 6, 5, 6, 6, 6, 5, 6, 6, 8), 4, 8, 9  # samples of each block; three per shard


def lanes() -> plt.Figure:
    """Draw shards, the lanes of one epoch and its global batches, as data/order.py computes them."""
    sizes = np.array(BLOCKS)
    epoch = Epoch.of(sizes, seed=0, epoch=0)
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(9, 6.2), height_ratios=(0.9, 1.7, 2.4))
    starts = np.cumsum(sizes) - sizes
    for block, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        box(top, start, 0, size, colour(block), f"{block}")
    for shard in range(4):
        top.text(starts[3 * shard], 1.25, f"shard {shard}", color=SHARDS[shard], va="bottom")
    top.set_ylim(0, 1.6)
    title(top, "Shards lie in the store as blocks of neighbouring samples (16 MiB, here 5 to 8 samples)")
    for number in range(LANES):
        at = 0
        for run in read(epoch, number):
            box(middle, at, -number, run.last - run.first, colour(run.block), f"{run.block}")
            at += run.last - run.first
        middle.text(-0.6, -number + 0.45, f"lane {number}", ha="right", va="center")
    title(middle, "An epoch shuffles the blocks and cuts their sequence into lanes of equal length")
    draw_batches(bottom, epoch)
    title(
        bottom, "Every global batch takes the next samples of each lane: any number of readers gives the same batches"
    )
    top.set_xlim(-5, sizes.sum() + 0.5)
    middle.set_xlim(-1.3, 18.5)
    figure.tight_layout(h_pad=1.5)
    return figure


def read(epoch: Epoch, number: int) -> Any:
    lane = epoch.lane(number, lanes=LANES, batch=BATCH)
    return [lane[i] for i in range(len(lane))]


def draw_batches(axes: Axes, epoch: Epoch) -> None:
    """Draw the samples of each step, in a column for each; braces name who reads the lanes."""
    each = BATCH // LANES
    for number in range(LANES):
        samples = [(run.block, i) for run in read(epoch, number) for i in run.order(seed=0, epoch=0)]
        for step in range(STEPS):
            for row, (block, i) in enumerate(samples[step * each : (step + 1) * each]):
                faded = 0.35 if step > 5 else 1.0
                y = -(number * (each + 0.35) + row)
                box(axes, step * 1.6, y, 1.45, colour(block), f"{block}·{i}", alpha=faded, size=7)
    bottom = -(LANES * (each + 0.35)) + 0.9
    for step in range(STEPS):
        axes.text(step * 1.6 + 0.72, bottom - 0.15, f"step {step}", ha="center", va="top", fontsize=8)
    stop = 6 * 1.6 - 0.08
    axes.plot([stop, stop], [bottom, 1.2], color=RED, lw=1.4, ls="--")
    axes.text(
        stop + 0.1,
        bottom - 1.0,
        "killed here: it goes on with step 6,\nwhose place in every lane is 6 x 2",
        color=RED,
        va="top",
    )
    half = each + 0.35
    for name, x, many in (("1 reader", 15.2, 4), ("2 readers", 17.0, 2), ("4 readers", 18.8, 1)):
        axes.text(x + 0.2, 1.25, name, ha="center", va="bottom", fontsize=8)
        for first in range(0, LANES, many):
            high, low = 0.9 - first * half, 0.9 - (first + many) * half + 0.45
            axes.plot([x, x + 0.25, x + 0.25, x], [high, high, low, low], color=GREY, lw=1.2)
    axes.set_xlim(-0.9, 20)
    axes.set_ylim(bottom - 2.6, 2.2)


def colour(block: int) -> str:
    return SHARDS[block // 3]


def box(axes: Axes, x: float, y: float, width: float, fill: str, text: str, alpha: float = 1, size: int = 8) -> None:
    axes.add_patch(Rectangle((x, y), width, 0.92, facecolor=fill, edgecolor="white", lw=1, alpha=alpha))
    axes.text(x + width / 2, y + 0.44, text, ha="center", va="center", color="white", fontsize=size)


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9.5, color=INK)
    axes.axis("off")
    axes.autoscale_view()


# Goodput


def goodput() -> plt.Figure:
    """Draw where the time of a run goes when a worker is killed and when it is stopped in order."""
    figure, axes = plt.subplots(figsize=(9, 2.5))
    spans = [
        (4, LIGHT, "start"),
        (22, BLUE, "steps"),
        (1.2, GREY, ""),
        (16, BLUE, "steps"),
        (6, RED, "lost steps"),
        (5, LIGHT, "start again"),
        (6, BLUE, "same again"),
        (14, BLUE, "steps"),
        (1.2, GREY, ""),
        (13, "white", "stopped: does not count"),
        (4, LIGHT, "start"),
        (18, BLUE, "steps"),
    ]
    at = 0.0
    for width, fill, text in spans:
        axes.add_patch(
            Rectangle((at, 0), width, 1, facecolor=fill, edgecolor=GREY if fill == "white" else "white", lw=1)
        )
        dark = fill in (LIGHT, "white")
        shown = textwrap.fill(text, 8) if width > 2.5 else ""
        axes.text(at + width / 2, 0.5, shown, ha="center", va="center", color=INK if dark else "white", fontsize=8)
        at += width
    for x, text in (
        (26.6, "checkpoint"),
        (49.2, "a worker dies"),
        (74.8, "Ctrl-C: checkpoint"),
        (88.4, "same command"),
    ):
        axes.annotate(
            text, (x, 1.02), (x, 1.55), ha="center", fontsize=8.5, arrowprops={"arrowstyle": "-", "color": GREY}
        )
    useful = sum(width for width, fill, _ in spans if fill == BLUE)
    counted = sum(width for width, fill, _ in spans if fill != "white")
    axes.text(0, -0.7, "goodput  =", fontsize=10, va="center")
    axes.add_patch(Rectangle((14.5, -0.85), 2, 0.3, facecolor=BLUE))
    axes.text(
        17, -0.7, "/  everything since the first start but the pause after an orderly stop", fontsize=10, va="center"
    )
    axes.text(14.5, -1.25, f"{useful / counted:.0%} in this picture", fontsize=10, va="center", color=BLUE)
    axes.set_xlim(-0.5, at + 0.5)
    axes.set_ylim(-1.6, 2.0)
    axes.axis("off")
    figure.tight_layout()
    return figure


# Rooms


def rooms_of() -> dict[str, tuple[str, list[str]]]:
    """Return the first sentence of every room, and the rooms that its `__init__` allows it to import."""
    files = sorted(SOURCE.glob("*/__init__.py"))
    names, out = [file.parent.name for file in files], {}
    for name, file in zip(names, files, strict=True):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        listed = re.search(r"May import: ([^.]*)\.", text)
        allowed = set(re.findall(r"\w+", listed[1])) & set(names) if listed else set()
        out[name] = (" ".join(text.partition("\n\n")[0].split()), sorted(allowed))
    return out


def digest() -> str:
    """Return a digest of what the picture of the rooms shows."""
    return hashlib.sha256(repr(rooms_of()).encode()).hexdigest()


def rooms() -> plt.Figure:
    """Draw the rooms of the package, each above those that it imports. Arrows that others imply are left out."""
    described = rooms_of()
    allowed = {name: set(below) for name, (_, below) in described.items()}
    level: dict[str, int] = {}
    for name in sorted(allowed, key=lambda room: len(reach(allowed, room))):
        level[name] = 1 + max((level[below] for below in allowed[name]), default=-1)
    rows = [[name for name in allowed if level[name] == i] for i in range(max(level.values()) + 1)]
    place = {name: (4.3 * (i - (len(row) - 1) / 2), 1.0 * level[name]) for row in rows for i, name in enumerate(row)}
    figure, axes = plt.subplots(figsize=(9, 0.78 * len(rows)))
    for name, (x, y) in place.items():
        axes.add_patch(
            FancyBboxPatch(
                (x - 1.95, y - 0.27), 3.9, 0.54, boxstyle="round,pad=0.03", facecolor="white", edgecolor=BLUE, zorder=2
            )
        )
        axes.text(x - 1.87, y, name, ha="left", va="center", fontweight="bold", fontsize=8, color=BLUE)
        axes.text(x - 0.75, y, brief(described[name][0]), ha="left", va="center", fontsize=6.4)
        for below in direct(allowed, name):
            to = place[below]
            axes.annotate(
                "",
                (to[0] + (x - to[0]) * 0.3, to[1] + 0.3),
                (x, y - 0.3),
                arrowprops={"arrowstyle": "->", "color": GREY},
                zorder=1,
            )
    axes.set_xlim(-6.5, 6.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.axis("off")
    figure.tight_layout()
    return figure


def brief(sentence: str) -> str:
    """Return a sentence in three short lines, or its beginning."""
    return textwrap.fill(sentence.replace("`", "").rstrip("."), 36, max_lines=3, placeholder=" ...")


def reach(allowed: dict[str, set[str]], room: str) -> set[str]:
    """Return every room below a room."""
    return allowed[room].union(*(reach(allowed, below) for below in allowed[room]))


def direct(allowed: dict[str, set[str]], room: str) -> set[str]:
    """Return the rooms below a room that it does not reach through another one."""
    return {b for b in allowed[room] if not any(b in reach(allowed, other) for other in allowed[room] - {b})}


if __name__ == "__main__":
    for draw in (lanes, goodput, rooms):
        note = {NOTE: digest()} if draw is rooms else {}
        draw().savefig(IMAGES / f"{draw.__name__}.png", dpi=2 * DPI, metadata={"Software": None} | note)
