#!/usr/bin/env python
"""Draws the figure of each method in docs/methods.md: who sees what, where gradients flow, and the loss."""

import io
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from eagleray.base.plotting import BLUE, GREY, INK, LIGHT, RED

IMAGES = Path(__file__).with_name("images") / "methods"
AVERAGE, SAME, FROZEN = "moving\naverage", "same\nweights", ""
HEIGHT, GAP = 0.62, 0.34  # of a box, and between boxes, in units of the axes, which are inches
SAMPLE, BOX, LOSS = 1.5, 1.3, 3.3  # widths of boxes: views, parts of a network, and losses
COLOURS = 48  # of a picture in its file
NOTE = "Source"  # the metadata of a picture that says what it was drawn from

matplotlib.use("agg")
plt.rcParams.update({"font.size": 8, "text.color": INK, "mathtext.fontset": "cm"})


@dataclass(frozen=True)
class Branch:
    """What a network is given, its parts, and what comes out."""

    sees: str
    parts: tuple[str, ...]
    out: str  # in TeX


@dataclass(frozen=True)
class Figure:
    """A trained network, a second one beside it, and the losses in words and in TeX."""

    trained: Branch
    losses: tuple[tuple[str, str], ...]
    second: Branch | None = None
    link: str = SAME  # of the second network to the trained one
    memory: str = ""  # a store of vectors that the loss reads
    stopped: bool = True  # no gradient flows through the second network


CONTRAST = r"-\log\;\dfrac{e^{q\cdot k^+/\tau}}{e^{q\cdot k^+/\tau}+\sum_i e^{q\cdot k_i/\tau}}"
PREDICT = r"-\sum_j p^{\,t}_j\,\log p^{\,s}_j"
STUDENT, TEACHER = ("backbone", "head,\nprototypes"), ("teacher's\nbackbone", "head,\nprototypes")
MOMENTUM = ("momentum\nbackbone", "projector")
ALL, LARGE, TWO = "all crops", "the two large\ncrops", "two crops"
HIDDEN = "all crops, the large\nwith patches hidden"
VIEWS, REGIONS = "views: teacher's of another crop", "regions: the most similar of another crop"
CENTRED = r"$p^{\,t}=\mathrm{softmax}\,((z-c)/\tau_t)$,  $c$: running mean"

FIGURES = {
    "mocov3": Figure(
        Branch("crop 1,\ncrop 2", ("backbone", "projector", "predictor"), "q"),
        ((r"$k_i$: keys of the whole batch", rf"2\tau\;\cdot\;{CONTRAST}"),),
        Branch("crop 2,\ncrop 1", MOMENTUM, "k"),
        AVERAGE,
    ),
    "moco": Figure(
        Branch("crop 1", ("backbone", "projector"), "q"),
        ((r"$k_i$: keys in the queue", CONTRAST),),
        Branch("crop 2", MOMENTUM, "k"),
        AVERAGE,
        memory="queue of keys",
    ),
    "densecl": Figure(
        Branch("crop 1", ("backbone", "head of images,\nhead of patches"), "q"),
        (
            ("images: as MoCo", r"0.5\;L(q, k^+, \mathrm{queue})"),
            ("patches: the most similar patch", r"0.5\;L(q_p, k_p^+, \mathrm{queue}_p)"),
        ),
        Branch("crop 2", ("momentum\nbackbone", "head of images,\nhead of patches"), "k"),
        AVERAGE,
        memory="two queues",
    ),
    "detco": Figure(
        Branch("crop 1,\npatches of crop 3", ("backbone,\n4 stages", "head of images,\nhead of patches"), "q"),
        (
            ("every stage: images, patches", r"w_s\;L(q, k^+, \mathrm{queue})+w_s\;L(q_p, k_p^+, \mathrm{queue}_p)"),
            ("every stage: patches and images", r"w_s\;L(q_p, k^+, \mathrm{queue})"),
        ),
        Branch("crop 2,\npatches of crop 4", ("momentum\nbackbone", "head of images,\nhead of patches"), "k"),
        AVERAGE,
        memory="two queues\nof each stage",
    ),
    "pixpro": Figure(
        Branch("crop 1,\ncrop 2", ("backbone", "head of\npatches", "propagation"), "y"),
        (
            (r"$A$: pairs of patches that lie near in the image", r"-\mathrm{mean}_{\,i,j\in A}\;\cos(y_i, x'_j)"),
            (
                "propagation: by the patches like it",
                r"y_i=\sum_j\,\max(\cos(x_i, x_j),\,0)^{\gamma}\;g(x_j)",
            ),
        ),
        Branch("crop 2,\ncrop 1", ("momentum\nbackbone", "head of\npatches"), "x'"),
        AVERAGE,
    ),
    "instloc": Figure(
        Branch("crop 1 pasted\non an image", ("backbone,\nlast stage: box", "projector"), "q"),
        ((r"$k_i$: keys in the queue, of boxes", CONTRAST),),
        Branch("crop 2 pasted\non another", ("momentum\nbackbone: box", "projector"), "k"),
        AVERAGE,
        memory="queue of keys",
    ),
    "instdisc": Figure(
        Branch("one crop", ("backbone", "linear layer"), "v"),
        (
            (
                r"its stored $v_i$ against 4096 others (NCE)",
                r"P(i\,|\,v)=\dfrac{e^{v_i\cdot v/\tau}}{\sum_j e^{v_j\cdot v/\tau}}",
            ),
        ),
        memory="a vector of\nevery image",
    ),
    "pirl": Figure(
        Branch("nine patches\nof crop 2", ("backbone", "linear layers,\neach and all"), "g"),
        (
            (r"patches: stored $m$ against 32000 others", r"\lambda\;\mathrm{NCE}(m, g)"),
            (r"image: the same", r"(1-\lambda)\;\mathrm{NCE}(m, f)"),
        ),
        Branch("crop 1", ("backbone", "linear layer"), "f"),
        memory="a vector of\nevery image",
        stopped=False,
    ),
    "simclr": Figure(
        Branch("crop 1", ("backbone", "projector"), "z"),
        (
            (
                "all other crops of the batch",
                r"-\log\;\dfrac{e^{z\cdot z'/\tau}}{\sum_{k\neq z} e^{z\cdot z_k/\tau}}",
            ),
        ),
        Branch("crop 2", ("backbone", "projector"), "z'"),
        stopped=False,
    ),
    "byol": Figure(
        Branch("crop 1,\ncrop 2", ("backbone", "projector", "predictor"), "q"),
        (("the other crop's projection", r"2-2\,\cos(q, z')"),),
        Branch("crop 2,\ncrop 1", MOMENTUM, "z'"),
        AVERAGE,
    ),
    "simsiam": Figure(
        Branch("crop 1,\ncrop 2", ("backbone", "projector", "predictor"), "p"),
        (("the other crop's projection", r"-\cos(p, z')"),),
        Branch("crop 2,\ncrop 1", ("backbone", "projector"), "z'"),
    ),
    "barlow_twins": Figure(
        Branch("crop 1", ("backbone", "projector"), "z"),
        (("$C$: correlation of channels", r"\sum_i (1-C_{ii})^2+\lambda\sum_{i\neq j} C_{ij}^2"),),
        Branch("crop 2", ("backbone", "projector"), "z'"),
        stopped=False,
    ),
    "vicreg": Figure(
        Branch("crop 1", ("backbone", "projector"), "z"),
        (
            ("invariance", r"25\;\|z-z'\|^2"),
            ("variance", r"25\;\max(0,\,1-\mathrm{std}(z))"),
            ("covariance", r"1\;\sum_{i\neq j}\mathrm{cov}(z)_{ij}^2"),
        ),
        Branch("crop 2", ("backbone", "projector"), "z'"),
        stopped=False,
    ),
    "swav": Figure(
        Branch(ALL, ("backbone", "projector", "prototypes"), "p"),
        (("the other crop's assignment", r"-\sum_j y_j\,\log p_j"),),
        Branch(LARGE, ("backbone", "projector", "prototypes,\nSinkhorn"), "y"),
    ),
    "dino": Figure(
        Branch(ALL, STUDENT, "p^{\\,s}"),
        ((VIEWS, PREDICT), (CENTRED, "")),
        Branch(LARGE, TEACHER, "p^{\\,t}"),
        AVERAGE,
    ),
    "ibot": Figure(
        Branch(HIDDEN, STUDENT, "p^{\\,s}"),
        ((VIEWS, PREDICT), ("hidden patches: teacher's of the place", PREDICT)),
        Branch(LARGE, TEACHER, "p^{\\,t}"),
        AVERAGE,
    ),
    "dinov2": Figure(
        Branch(HIDDEN, ("backbone", "head of images,\nhead of patches"), "p^{\\,s}"),
        (
            (VIEWS, PREDICT),
            ("hidden patches: teacher's of the place", PREDICT),
            (r"KoLeo: $d$, distance to the nearest", r"-0.1\,\log d"),
        ),
        Branch(LARGE, ("teacher's\nbackbone", "two heads,\nSinkhorn"), "p^{\\,t}"),
        AVERAGE,
    ),
    "dinov3": Figure(
        Branch(HIDDEN, ("backbone", "head of images,\nhead of patches"), "p^{\\,s}"),
        (
            ("images and hidden patches: as DINOv2", PREDICT),
            (r"KoLeo: $d$, distance to the nearest", r"-0.1\,\log d"),
            (r"Gram: patches $x$ and an earlier teacher's $g$", r"2\;\|XX^{\top}-GG^{\top}\|^2"),
        ),
        Branch(LARGE, ("teacher's\nbackbone", "two heads,\nSinkhorn"), "p^{\\,t}"),
        AVERAGE,
        memory="an earlier\nteacher: Gram",
    ),
    "esvit": Figure(
        Branch(ALL, ("backbone", "head of views,\nhead of regions"), "p^{\\,s}"),
        ((VIEWS, rf"L_V=\;{PREDICT}"), (REGIONS, rf"L_R=\;{PREDICT}")),
        Branch(LARGE, ("teacher's\nbackbone", "head of views,\nhead of regions"), "p^{\\,t}"),
        AVERAGE,
    ),
    "moby": Figure(
        Branch("crop 1,\ncrop 2", ("backbone", "projector", "predictor"), "q"),
        ((r"$k_i$: keys in the view's queue", CONTRAST),),
        Branch("crop 2,\ncrop 1", MOMENTUM, "k"),
        AVERAGE,
        memory="a queue for\neach view",
    ),
    "selfpatch": Figure(
        Branch(ALL, ("backbone", "class\nattention", "heads"), "p^{\\,s}"),
        ((VIEWS, PREDICT), ("patches: of 4 similar neighbours", PREDICT)),
        Branch(ALL, ("teacher's\nbackbone", "class\nattention", "heads"), "p^{\\,t}"),
        AVERAGE,
    ),
    "lejepa": Figure(
        Branch(ALL, ("backbone", "linear layer", "projector"), "z"),
        (
            (r"$\bar z$: mean of the large views", r"(1-\lambda)\;\|z-\bar z\|^2"),
            ("SIGReg: Gaussian in all directions", r"\lambda\;\mathrm{SIGReg}(z)"),
        ),
    ),
    "mae": Figure(
        Branch("a quarter of the\npatches", ("backbone", "decoder of\nall patches"), "\\hat x"),
        (("pixels of the hidden patches", r"\|\hat x-x\|^2"),),
    ),
    "mpp": Figure(
        Branch("half of the patches\nmasked or exchanged", ("backbone", "linear layer"), "p"),
        (("mean colours of those patches", r"-\log\;p_{\mathrm{colour}}"),),
    ),
    "distill": Figure(
        Branch(TWO, ("backbone", "head of images,\nhead of patches"), "s"),
        (
            ("images", r"1-\cos(s, t)"),
            ("patches", r"0.9\,(1-\cos(s_p, t_p))+0.1\;\mathrm{L1}(s_p, t_p)"),
        ),
        Branch(TWO, ("frozen\nteacher",), "t"),
        FROZEN,
    ),
}


def draw(spec: Figure) -> plt.Figure:
    """Draw a method."""
    rows = [0.0] if spec.second is None else [0.0, -1.75 if spec.memory else -1.35]
    store = -1.0 if spec.second is None else rows[-1] / 2  # the height of the memory
    low = store if spec.memory and spec.second is None else rows[-1]
    chain = max(len(b.parts) for b in (spec.trained, spec.second) if b)
    end = SAMPLE + GAP + chain * (BOX + GAP) + 0.4
    middle, height = low / 2, max(len(spec.losses) * 0.66 + 0.2, HEIGHT - low)
    figure, axes = plt.subplots(figsize=(end + LOSS + 0.15, height + 0.2))
    draw_branch(axes, spec.trained, 0, BLUE, end, stopped=False)
    if spec.second:
        draw_branch(axes, spec.second, rows[1], GREY if spec.stopped else BLUE, end, stopped=spec.stopped)
        x = SAMPLE + GAP + BOX / 2
        if spec.link:
            style = "->" if spec.link == AVERAGE else "<->"
            arrow(axes, (x, -HEIGHT / 2), (x, rows[1] + HEIGHT / 2), style, GREY, dashed=True)
            axes.text(x + 0.08, middle, spec.link, va="center", color=GREY, fontsize=7.5)
    if spec.memory:
        x = SAMPLE + 2 * GAP + BOX
        box(axes, x, store, BOX, spec.memory, LIGHT, INK)
        arrow(axes, (x + BOX, store), (end, store))
        if spec.second:
            arrow(axes, (x + BOX / 2, rows[1] + HEIGHT / 2), (x + BOX / 2, store - HEIGHT / 2), colour=GREY)
    draw_losses(axes, spec, end, middle, height)
    axes.set_xlim(-0.05, end + LOSS + 0.1)
    axes.set_ylim(middle - height / 2 - 0.1, middle + height / 2 + 0.1)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure


def draw_branch(axes: Axes, branch: Branch, y: float, colour: str, end: float, *, stopped: bool) -> None:
    """Draw what a network sees, its parts and its output, which goes to the loss."""
    box(axes, 0, y, SAMPLE, branch.sees, LIGHT, INK)
    x = SAMPLE
    for part in branch.parts:
        arrow(axes, (x, y), (x + GAP, y))
        box(axes, x + GAP, y, BOX, part, "white", colour)
        x += GAP + BOX
    arrow(axes, (x, y), (end, y), colour=colour)
    axes.text(end - 0.22, y + 0.12, f"${branch.out}$", ha="center", va="bottom", fontsize=10)
    if stopped:  # two bars across the arrow
        for at in (x + 0.12, x + 0.18):
            axes.plot([at, at], [y - 0.13, y + 0.13], color=RED, lw=1.5)
        axes.text(x + 0.08, y - 0.17, "no gradient", color=RED, fontsize=7, va="top")


def draw_losses(axes: Axes, spec: Figure, x: float, middle: float, height: float) -> None:
    """Draw the losses, one below the other."""
    panel(axes, x, middle, (LOSS, height), "#fff8ee", "#b36f00")
    each = height / len(spec.losses)
    for i, (words, tex) in enumerate(spec.losses):
        y = middle + height / 2 - (i + 0.5) * each
        if not tex:
            axes.text(x + LOSS / 2, y, words, ha="center", va="center", fontsize=8)
            continue
        up = min(0.26, each / 4)
        axes.text(x + LOSS / 2, y + up, words, ha="center", va="center", fontsize=7.5, color="#7a4c00")
        axes.text(x + LOSS / 2, y - up / 1.6, f"${tex}$", ha="center", va="center", fontsize=10.5)


def box(axes: Axes, x: float, y: float, width: float, text: str, fill: str, edge: str) -> None:
    """Draw a box with a text; (x, y) is the middle of its left side."""
    panel(axes, x, y, (width, HEIGHT), fill, edge if fill == "white" else fill)
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=8)


def panel(axes: Axes, x: float, y: float, size: tuple[float, float], fill: str, edge: str) -> None:
    """Draw a box of a width and a height; (x, y) is the middle of its left side."""
    width, height = size[0] - 0.06, size[1] - 0.06
    place = (x + 0.03, y - height / 2)
    axes.add_patch(FancyBboxPatch(place, width, height, boxstyle="round,pad=0.03", facecolor=fill, edgecolor=edge))


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    style: str = "->",
    colour: str = INK,
    *,
    dashed: bool = False,
) -> None:
    """Draw an arrow."""
    properties = {
        "arrowstyle": style,
        "color": colour,
        "linestyle": "--" if dashed else "-",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", end, start, arrowprops=properties)


def main() -> None:
    """Write the pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, spec in FIGURES.items():
        figure = draw(spec)
        figure.savefig(buffer := io.BytesIO(), dpi=180)
        plt.close(figure)
        (note := PngInfo()).add_text(NOTE, repr(spec))
        picture = Image.open(buffer).convert("RGB").quantize(COLOURS)
        picture.save(IMAGES / f"{name}.png", optimize=True, pnginfo=note)


if __name__ == "__main__":
    main()
