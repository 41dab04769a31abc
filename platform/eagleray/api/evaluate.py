"""Evaluate a backbone with the protocols of the literature."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.api.run import Run
from eagleray.base.errors import UserError
from eagleray.config import plugins as loading
from eagleray.evaluation.given import check_backbone, check_data, check_gpus
from eagleray.evaluation.results import Result, table

if TYPE_CHECKING:
    from eagleray.evaluation.evaluate import Report


class Scores(dict[str, float]):
    """Scores by name, such as `knn/top1` in percent. Printing them shows a table."""

    results: list[Result]  # the outcome of each protocol with all its settings, as results.json keeps it
    out: str  # the folder or s3:// URL of results.json and the pictures

    def __init__(self, report: "Report") -> None:
        asked = [r for r in report.results if r.untrained == report.untrained]  # not those it is compared with
        super().__init__({f"{r.protocol}/{k.partition('/')[2]}": v for r in asked for k, v in r.numbers.items()})
        self.results, self.out, self._report = report.results, report.folder, report

    def table(self, form: str = "markdown") -> str:
        """Return a table as `markdown`, `latex` or `json`: the scores, beside untrained and published ones where
        they are known."""
        return table(self._report.results, self._report.rows, form)

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of the table as dictionaries, with its column names as keys."""
        return [row._asdict() for row in self._report.rows]

    def __str__(self) -> str:
        return self.table()


class Refused(UserError):
    """Some protocols could not be run; `scores` holds the scores of the others."""

    def __init__(self, lines: Sequence[str], scores: Scores) -> None:
        super().__init__("; ".join(lines))
        self.scores = scores


def evaluate(
    backbone: str | Path | Run,
    *,
    train: str | Path | None = None,
    test: str | Path | None = None,
    protocols: str | Sequence[str] = ("knn", "linear"),
    coco: str | Path | None = None,
    masks: str | Path | None = None,
    davis: str | Path | None = None,
    frames: str | Path | None = None,
    suite: str | Path | None = None,
    architecture: str | None = None,
    untrained: bool = False,
    workers: int = 0,
    gpus: bool = False,
    out: str | Path | None = None,
    plugins: Sequence[str | Path] = (),
    **settings: Any,
) -> Scores:
    """Evaluate a backbone and return the numbers by name.

    `backbone` is a run or its checkpoint, `timm:NAME`, a file of tensors with timm's name of its `architecture`, or
    `untrained:NAME`. `train` is labelled data to learn from and `test` data to test on; without `test` a tenth of
    `train` is held out. `coco`, `masks`, `davis`, `frames` and `suite` are the folders or s3:// URLs that other
    `protocols` need. `untrained=True` evaluates the same architecture without training, too. `workers` Ray workers
    extract features, measure videos and fine-tune networks, 0 means this process; with `gpus=True` each worker has a
    GPU. Further keywords are settings of the protocols, such as `k=10`, or of one of them: `**{"linear.epochs": 10}`.
    `plugins` are files and modules to load, which the run of a plug-in's method needs. Every result is kept in
    results.json in `out`, by default the run's folder.

    Raises UserError when the backbone, the data or a setting is wrong, and its subclass Refused, after the other
    protocols are done, when some could not be run.

    Example:

        scores = eagleray.evaluate("runs/a", train="shards/", protocols=["knn"], k=5)
        scores["knn/top1"]
        print(scores)
    """
    folders = {"coco": coco, "masks": masks, "davis": davis, "frames": frames, "suite": suite}
    loading.use(plugins)
    check_gpus(gpus, workers)
    check_backbone(os.fspath(backbone), architecture)
    for data in (train, test):
        if data:
            check_data(os.fspath(data))
    from eagleray.evaluation import evaluate as evaluation

    request = evaluation.Request(
        backbone=os.fspath(backbone),
        protocols=[p.strip() for p in (protocols.split(",") if isinstance(protocols, str) else protocols)],
        train=str(train) if train else None,
        test=str(test) if test else None,
        folders={need: str(folder) for need, folder in folders.items() if folder},
        settings=settings,
        architecture=architecture,
        untrained=untrained,
        workers=workers,
        gpus=gpus,
        out=str(out) if out else None,
    )
    report = evaluation.evaluate(request)
    scores = Scores(report)
    if report.refused:
        raise Refused(report.refused, scores)
    return scores
