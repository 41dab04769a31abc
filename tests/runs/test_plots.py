"""What is drawn of a run."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import pytest

from eagleray.base.errors import UserError
from eagleray.runs.plots import POINTS, draw, place, thin

LAYERS = ("patch_embed", "blocks.00", "blocks.01", "trunk", "heads")
EVERY = {"loss": 2.0, "lr": 1e-3} | {f"grad/{name}": 0.1 * (1 + i) for i, name in enumerate(LAYERS)}
LOOK = {f"health/{part}_{what}": 0.5 for part in ("backbone", "projector") for what in ("std", "rank")}
LOOK |= {"health/update": 1e-3, "health/ema_distance": 1e-2}


def records(n: int = 40, **more: float) -> list[dict[str, float]]:
    return [{"step": 10 * (i + 1)} | EVERY | (LOOK if i % 3 == 2 else {}) | more for i in range(n)]


def finding(step: int, kind: str, text: str = "") -> dict[str, Any]:
    return {"step": step, "kind": kind, "text": text}


Draw = Callable[..., matplotlib.figure.Figure]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """The figure that is saved for a history."""
    saved: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: saved.append(figure))

    def of(history: Sequence[Any], findings: Sequence[Any] = (), summary: Any = None) -> matplotlib.figure.Figure:
        for name, lines in (("metrics", history), ("health", findings)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if summary:
            (tmp_path / "summary.json").write_text(json.dumps(summary))
        draw(tmp_path)
        return saved[-1]

    return of


def panels(figure: matplotlib.figure.Figure) -> dict[str, Any]:
    return {axes.get_ylabel(): axes for axes in figure.axes if axes.get_ylabel()}


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def triangles(axes: Any) -> list[tuple[float, float]]:
    marked = [line for line in axes.get_lines() if line.get_marker() in ("^", "v")]
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in marked]


ALWAYS = ["loss", "gradient norm", "spread", "rank", "share of weights"]


@pytest.mark.parametrize(
    ("more", "added"),
    [
        ({}, set()),
        ({"monitor/knn": 30.0}, {"kNN, top-1 %"}),
        ({"entropy": 0.5, "usage": 0.7}, {"share of ln K"}),
        ({"gain": 1.0}, {"gain, nats"}),
    ],
)
def test_there_is_a_panel_for_what_the_records_hold_and_no_other(drawn: Draw, more: dict[str, float], added: set[str]):
    assert set(panels(drawn(records(**more)))) == {*ALWAYS, *added}


def test_layers_go_from_the_pixels_up(drawn: Draw):
    axes = panels(drawn(records()))["gradient norm"]
    assert list(lines(axes)) == ["patch_embed", "blocks.00", "blocks.01", "rest of the trunk", "heads"]
    assert axes.get_yscale() == "log"
    light = [sum(line.get_color()[:3]) for name, line in lines(axes).items() if "blocks" in name]
    assert light == sorted(light), "in grey, too, depth is seen"


def test_of_many_layers_few_are_named(drawn: Draw):
    deep = {f"grad/blocks.{i:02}": 1.0 for i in range(24)}
    axes = panels(drawn(records(**deep)))["gradient norm"]
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [n for n in named if "blocks" in n] == ["blocks.00", "blocks.12", "blocks.23"]
    assert len(axes.get_lines()) == 24 + 3


def test_what_was_found_is_shown_where_it_was(drawn: Draw):
    history = records(**{"monitor/knn": 30.0})
    history[6]["grad/blocks.00"] = 50.0
    history[11]["monitor/knn"] = 12.0
    findings = [finding(67, "spike", "gradients 500 times their median, first in blocks.00, in all layers at once")]
    findings += [finding(120, "kNN dip"), finding(300, "collapse")]
    shown = panels(figure := drawn(history, findings))
    assert triangles(shown["gradient norm"]) == [(67, 50.0)]
    assert triangles(shown["kNN, top-1 %"]) == [(120, 12.0)]
    assert not any(triangles(axes) for name, axes in shown.items() if name not in ("gradient norm", "kNN, top-1 %"))
    for axes in shown.values():
        assert {67, 120, 300} <= {path[0, 0] for c in axes.collections for path in c.get_segments()}
    assert {text.get_text() for text in shown["loss"].texts} == {"spike, first in blocks.00", "kNN dip", "collapse"}
    assert "collapse (step 300)" in figure.texts[0].get_text()


def test_evaluations_begin_with_the_untrained_backbone(drawn: Draw):
    history = records(**{"monitor/knn": 30.0})
    history[19]["knn/top1"] = 35.0
    done = {"steps": 400, "knn/top1": 40.0, "knn/top1_untrained": 20.0}
    line = lines(panels(drawn(history, summary=done))["kNN, top-1 %"])["evaluation"]
    assert list(zip(*line.get_data(), strict=True)) == [(0, 20.0), (200, 35.0), (400, 40.0)]


def test_the_score_of_an_earlier_end_is_at_its_step(drawn: Draw):
    """A run that goes on with more steps keeps its summary until it ends again."""
    history = records(**{"monitor/knn": 30.0})
    history[29]["knn/top1"] = 45.0
    figure = drawn(history, summary={"steps": 200, "knn/top1": 40.0})
    line = lines(panels(figure)["kNN, top-1 %"])["evaluation"]
    assert list(zip(*line.get_data(), strict=True)) == [(200, 40.0), (300, 45.0)]


def test_a_run_without_labels_has_a_summary_too(drawn: Draw):
    assert "kNN, top-1 %" not in panels(drawn(records(), summary={"steps": 400}))


def test_what_is_not_finite_is_left_out(drawn: Draw):
    history = records()
    history[3]["loss"], history[4]["loss"] = float("nan"), float("inf")
    for record in history:
        record["grad/heads"] = float("nan")
    shown = panels(drawn(history))
    assert list(lines(shown["loss"])["loss"].get_xdata()) == [10, 20, 30, *range(60, 401, 10)]
    assert "heads" not in lines(shown["gradient norm"])


@pytest.mark.filterwarnings("error")
def test_a_run_that_does_not_move_is_drawn_too(drawn: Draw):
    still = {key: 0.0 for key in (EVERY | LOOK) if key.startswith(("grad/", "health/"))}
    assert set(panels(drawn(records(**still)))) == set(ALWAYS)


def test_a_long_run_is_thinned_but_keeps_its_spikes_and_dips(drawn: Draw):
    history = records(3 * POINTS)
    history[1234]["loss"], history[2345]["loss"] = 9.0, 0.5
    x, y = lines(panels(drawn(history))["loss"])["loss"].get_data()
    assert len(x) <= POINTS
    assert x[y.argmax()] == 12350
    assert x[y.argmin()] == 23460


def test_thinned_points_are_the_curves_own_and_in_order():
    rng = np.random.default_rng(0)
    x, y = np.arange(12345.0), rng.normal(size=12345)
    kept_x, kept_y = thin(x, y)
    assert POINTS / 2 < len(kept_x) <= POINTS
    assert (np.diff(kept_x) > 0).all()
    assert (y[kept_x.astype(int)] == kept_y).all()
    assert len(thin(x[:POINTS], y[:POINTS])[0]) == POINTS


CROWD = [finding(5 * i, kind) for i, kind in enumerate(["too large steps", "spike", "inputs", "non-finite"] * 20)]


@pytest.mark.parametrize("steps", [30, 400, 4000])
def test_names_do_not_overlap(drawn: Draw, steps: int):
    found = [f for f in CROWD if f["step"] <= steps] + [finding(steps, "collapse")]
    figure = drawn(records(steps // 10), found)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in panels(figure)["loss"].texts]
    assert len(boxes) >= 3
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.x1 <= figure.bbox.x1 and box.y1 < figure.texts[0].get_window_extent().y0 for box in boxes)


def test_no_line_up_to_a_name_crosses_another_name():
    letter = 0.07 * 400 / 7.05
    names = place([f for f in CROWD if f["step"] < 400], 400)
    for a, b in itertools.permutations(names, 2):
        assert b.row >= a.row or not b.step < a.step < b.step + letter * len(b.text), (a, b)


def test_where_names_have_no_room_every_kind_has_one_first():
    crowd = [finding(50, "non-finite")] * 30 + [finding(55, "spike"), finding(60, "collapse")]
    assert {n.text for n in place(crowd, 4000)} == {"non-finite", "spike", "collapse"}


@pytest.mark.parametrize("n", [1, 2])
def test_a_picture_is_written_of_few_records(tmp_path: Path, n: int):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records(n)))
    path = draw(tmp_path)
    assert path == tmp_path / "health.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_history_is_said(tmp_path: Path):
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        draw(tmp_path)
