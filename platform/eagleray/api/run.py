"""Represent a run as a Python object: where it is, what it measured, and its backbone."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.base.contexts import kept_generators
from eagleray.base.errors import UserError, hide_secrets
from eagleray.base.files import read_history
from eagleray.config import yaml_text
from eagleray.runs import layout
from eagleray.runs import tracking as track
from eagleray.runs.run_store import run_store
from eagleray.runs.summary import finished
from eagleray.storage import store

if TYPE_CHECKING:
    from eagleray.models.backbone import Backbone

PRINTED = {"steps", "images", "restarts", "goodput", "bad_samples", "wall_seconds"}  # keys needed to print a summary


class Run:
    """An existing pretraining run, given by its folder or s3:// URL.

    Example:

        run = eagleray.Run("runs/a")
        run.finished, run.summary["steps"], run.recipe["optim"]["batch"]
        run.metrics()
        backbone = run.backbone()
        print(run)
    """

    out: str  # absolute path or s3:// URL
    time_over: bool = False  # whether `max_hours` ended the call that returned this run
    folder: Path  # the run's files on this machine: `out` itself, or a copy if `out` is a URL

    def __init__(self, out: "str | Path | Run", *, steps: int = 0) -> None:
        """Open a run. It counts as finished when it has taken its planned steps, and at least `steps`. Raises
        UserError when there is no run."""
        self.out = address(out)
        self.folder = run_store(self.out).fetch()
        if not (self.folder / layout.RECIPE).exists():
            raise UserError(f"{self.out}: no run there; expected the folder or s3:// URL of a run")
        self._steps = steps

    @property
    def summary(self) -> dict[str, Any]:
        """Return the final numbers of the run, as in summary.json. `summary` is empty until the run has ended."""
        return finished(self.folder, self._steps) or {}

    @property
    def finished(self) -> bool:
        """Return whether the run has taken all its steps. To continue an interrupted run, repeat the call that started
        it."""
        lines = read_history(self.folder / layout.METRICS)
        return finished(self.folder, max(self._steps, lines[-1]["step"] if lines else 0)) is not None

    @property
    def recipe(self) -> dict[str, Any]:
        """Return the complete recipe of the run, as in recipe.yaml, as nested dictionaries."""
        return dict(yaml_text.parse((self.folder / layout.RECIPE).read_text()))

    def metrics(self, *, pandas: bool | None = None) -> Any:
        """Return a table with one row for each logged step: a pandas.DataFrame if pandas is installed, else a list of
        dictionaries. `pandas=True` returns the DataFrame, `pandas=False` the list.

        Example:

            losses = [row["loss"] for row in eagleray.Run("runs/a").metrics(pandas=False)]
        """
        rows = read_history(self.folder / layout.METRICS)
        if pandas is None:
            pandas = importlib.util.find_spec("pandas") is not None
        if not pandas:
            return rows
        import pandas as pd

        return pd.DataFrame(rows)

    def findings(self) -> list[dict[str, Any]]:
        """Return the health problems that the run has found, as in health.jsonl. Each has a step, a kind and a text."""
        return read_history(self.folder / layout.HEALTH)

    @kept_generators()
    def backbone(self) -> "Backbone":
        """Return the backbone of the newest intact checkpoint, in evaluation mode on the CPU. Raises UserError.

        Example:

            import torch

            backbone = eagleray.Run("runs/a").backbone()
            features = backbone(torch.randn(2, 3, 32, 32))
            features.pooled, features.patches  # (2, D), (2, N, D)
        """
        from eagleray.runs.restore import restore

        return restore(self.out).method.export().eval()

    def __fspath__(self) -> str:
        return self.out

    def __repr__(self) -> str:
        lines = read_history(self.folder / layout.METRICS)
        step = lines[-1]["step"] if lines else 0
        return f"Run({self.out!r}, finished={self.finished}, step={step})"

    def __str__(self) -> str:
        """Return the closing lines of `eagleray pretrain`."""
        summary = self.summary
        if not summary.keys() >= PRINTED:
            return repr(self)
        lost = f", goodput {summary['goodput']:.0%}" if summary["restarts"] else ""
        export = self.folder / layout.EXPORT
        lines = [
            f"{summary['steps']} steps, {summary['images']} images, {summary['restarts']} restart(s){lost}, "
            f"{summary['bad_samples']} bad sample(s), {summary['wall_seconds']:.0f} s",
            *(f"verdict   {sentence}" for sentence in summary.get("verdict", ())),
            f"results   {self.out}/{layout.SUMMARY}, {layout.METRICS}, {layout.LOG}",
            f"export    {self.out}/{layout.EXPORT}/backbone.safetensors",
        ]
        if (export / "backbone.json").exists():
            from eagleray.engine.export import snippet

            lines.append(f"load it   {snippet(export)}")
        if importlib.util.find_spec("mlflow"):
            lines.append(f"history   {history(track.tracking_of(self.folder).uri)}")
        return "\n".join(lines)


def address(out: "str | Path | Run") -> str:
    """Return the absolute path or the URL of a run."""
    return store.absolute(os.fspath(out).rstrip("/"))


def history(tracking: str) -> str:
    """Return the command that opens MLflow's pages, or their URL if a server shows them."""
    if not tracking.startswith("sqlite:"):
        return hide_secrets(tracking)
    here = Path(sys.executable).with_name("mlflow")
    known = not here.exists() or shutil.which("mlflow") == str(here)
    return f"{'mlflow' if known else os.path.relpath(here)} ui --backend-store-uri {tracking}"
