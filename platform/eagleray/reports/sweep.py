"""Make the report of a sweep: its trials, the best trial, and three plots."""

from collections import Counter
from pathlib import Path

from eagleray import config
from eagleray.reports.page import BUDGET, Page, Picture, Pictures, Section, Table, Texts, Tile, footer_text, picture_uri
from eagleray.sweeps import plots
from eagleray.sweeps.study import Study
from eagleray.sweeps.sweep import Sweep, count_trials

CAPTIONS = {
    "keys": "The objective over each key that the sweep varies.",
    "parallel": "Each trial is a line from key to key; darker is better.",
    "curves": "The objective over the share of each trial's steps.",
}


def page(folder: Path, out: str) -> Page:
    """Return the report of the sweep in `out`, a path or a URL; `folder` is a copy of it on this machine. Raises
    UserError when the folder cannot be read."""
    study = Study(config.load(Sweep, folder / "sweep.yaml"), out, folder=folder)
    best, keys, several = study.best(), study.keys(), len(study.sweep.alternatives) > 1
    columns = ["Trial", *["Alternative"] * several, *keys, "Steps", study.sweep.objective.key, "State", "Why"]
    rows = []
    for r in study.rows.values():
        named, values = [r["alternative"]] * several, [r["values"].get(k) for k in keys]
        rows.append([r["id"], *named, *values, r["step"], r["metric"], r["state"], r["why"]])
    drawn = [Picture(picture_uri(p, BUDGET // 3), CAPTIONS[p.stem], CAPTIONS[p.stem]) for p in plots.draw(study)]
    sections = [
        Section("Trials", [Table("Every trial that was started", columns, rows)] if rows else []),
        Section("Pictures", [Pictures(drawn, large=True)] if drawn else []),
        Section("Sweep", [Texts([("sweep.yaml", (folder / "sweep.yaml").read_text().rstrip())])]),
    ]
    tiles = [Tile("trials", len(rows), f"of {count_trials(study.sweep)}")]
    states = Counter(r["state"] for r in study.rows.values())
    tiles += [Tile(state, states[state]) for state in ("finished", "stopped", "failed") if states[state]]
    if best:
        tiles.append(Tile(f"best {study.sweep.objective.key}", best["metric"], f"trial {best['id']}"))
    return Page(
        title=f"Sweep {out.rpartition('/')[2]}",
        lead=[f"To compare its trials: eagleray report {out}/trials/*"],
        tiles=tiles,
        sections=[s for s in sections if s.blocks],
        footer=footer_text(out),
    )
