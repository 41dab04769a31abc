"""Make the report of a sweep: its trials, the best trial, three plots, and the curves of its trials."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagleray import config
from eagleray.reports import plots as plots_of_runs
from eagleray.reports.page import BUDGET, Page, Picture, Pictures, Section, Table, Texts, Tile, footer_text, picture_uri
from eagleray.reports.read import read
from eagleray.reports.sections import figures
from eagleray.runs import layout
from eagleray.runs.background import side_work
from eagleray.runs.run_store import run_store
from eagleray.storage import store
from eagleray.sweeps import plots
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import Sweep, count_trials, in_words

LONGEST = 40  # largest number of letters of the values in a trial's name

CAPTIONS = {
    "keys": "The objective over each key that the sweep varies.",
    "parallel": "Each trial is a line from key to key; darker is better.",
    "curves": "The objective over the share of each trial's steps.",
    "alternatives": "The alternatives, each with its best trial that took all its steps and the values of that.",
}


def page(folder: Path, out: str, pictures: Path) -> Page:
    """Return the report of the sweep at `out`, a path or a URL, and write PNGs of its trials' curves into the folder
    `pictures`. `folder` is a local copy of the sweep. Raises UserError when a folder cannot be read."""
    study = Study(config.load(Sweep, folder / "sweep.yaml"), out, folder=folder)
    best, keys, several = study.best(), study.keys(), len(study.sweep.alternatives) > 1
    columns = ["Trial", *["Alternative"] * several, *keys, "Steps", study.sweep.objective.key, "State", "Why"]
    rows = []
    for r in study.rows.values():
        named, values = [r["alternative"]] * several, [r["values"].get(k) for k in keys]
        rows.append([r["id"], *named, *values, r["step"], r["metric"], r["state"], r["why"]])
    lead, drawn = [f"To compare its trials: eagleray report {trials(out, len(rows))}"], []
    with side_work("The pictures could not be drawn", lead.append):
        drawn = [Picture(picture_uri(p, BUDGET // 3), CAPTIONS[p.stem], CAPTIONS[p.stem]) for p in plots.draw(study)]
    sections = [
        Section("Trials", [Table("Every trial that was started", columns, rows)] if rows else []),
        Section("Pictures", [Pictures(drawn, large=True)] if drawn else []),
        stability(study, pictures),
        Section("Sweep", [Texts([("sweep.yaml", (folder / "sweep.yaml").read_text().rstrip())])]),
    ]
    tiles = [Tile("trials", len(rows), f"of {count_trials(study.sweep)}")]
    states = Counter(r["state"] for r in study.rows.values())
    tiles += [Tile(state, states[state]) for state in ("finished", "stopped", "failed") if states[state]]
    if best:
        tiles.append(Tile(f"best {study.sweep.objective.key}", best["metric"], f"trial {best['id']}"))
    return Page(
        title=f"Sweep {out.rpartition('/')[2]}",
        lead=lead,
        tiles=tiles,
        sections=[s for s in sections if s.blocks],
        footer=footer_text(out),
    )


def trials(out: str, count: int) -> str:
    """Return a shell pattern for the folders of the `count` trials of a sweep. Locally this is `*`. For a URL, whose
    files a shell cannot list, it has braces."""
    if store.folder_of(out):
        return f"{out}/trials/*"
    return f"{out}/trials/{{000..{count - 1:03d}}}" if count > 1 else f"{out}/trials/000"


def stability(study: Study, pictures: Path) -> Section:
    """Return a section with the curves of kNN accuracy, loss and gradients of the trials in shared plots. If there are
    too many trials to be told apart, those shown are spread evenly from the worst to the best."""
    rows = [r for r in study.rows.values() if r["metric"] is not None]
    rows = [r for r in rows if run_store(study.trial(r["id"])).list(layout.METRICS)]
    order = sorted(rows, key=lambda r: r["metric"])
    if len(rows) > plots_of_runs.MOST:
        step = (len(rows) - 1) / (plots_of_runs.MOST - 1)
        kept = {order[round(i * step)]["id"] for i in range(plots_of_runs.MOST)}
        rows = [r for r in rows if r["id"] in kept]
    runs = {trial_name(study, r): read(study.trial(r["id"])) for r in rows}
    epochs = len({run.recipe.get("optim", {}).get("batch") for run in runs.values()}) > 1
    text = [f"A trial is named by its values of {', '.join(study.keys())}."]
    if len(rows) < len(order):
        text.append(f"{len(rows)} of {len(order)} trials, from the worst to the best.")
    return Section("Stability", figures(plots_of_runs.stability(runs, pictures, epochs=epochs)), text)


def trial_name(study: Study, row: Mapping[str, Any]) -> str:
    """Return the id of a trial with its values, such as `000: mocov3, 0.001`, or only the id if the values are long."""
    values = [in_words(value) for value in row["values"].values()]
    said = ", ".join([row["alternative"], *values] if len(study.sweep.alternatives) > 1 else values)
    return f"{row['id']}: {said}" if len(said) <= LONGEST else str(row["id"])
