"""Evaluate a backbone with the protocols of the literature."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.api.run import Run
from eagleray.base.console import say_loading
from eagleray.base.contexts import kept_generators
from eagleray.base.errors import UserError
from eagleray.cluster.ray_map import await_room
from eagleray.config import plugins as loading
from eagleray.evaluation.given import check_backbone, check_data, check_gpus
from eagleray.evaluation.registry import check_asked
from eagleray.evaluation.results import Result, table

if TYPE_CHECKING:
    from eagleray.evaluation.evaluate import Report


class Scores(dict[str, float]):
    """Scores by name, such as `knn/top1` in percent. Printing the scores shows one line for each protocol."""

    results: list[Result]  # the outcome of each protocol with all its settings, as results.json keeps it
    out: str  # the folder or s3:// URL of results.json and the pictures

    def __init__(self, report: "Report") -> None:
        asked = [r for r in report.results if r.untrained == report.untrained]  # no results of the untrained baseline
        super().__init__({f"{r.protocol}/{k.partition('/')[2] or k}": v for r in asked for k, v in r.numbers.items()})
        self.results, self.out, self._report = report.results, report.folder, report

    def table(self, form: str = "markdown") -> str:
        """Return the scores as a table in `markdown`, `latex` or `json`, or as `text` with one line for each protocol.
        If published scores and scores of the untrained backbone are known, the table has them too."""
        return table(self._report.results, self._report.rows, form)

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of the table as dictionaries whose keys are the column names."""
        return [row._asdict() for row in self._report.rows]

    def __str__(self) -> str:
        return self.table("text")


class Refused(UserError):
    """`evaluate` could not run some of the protocols; the attribute `scores` holds the scores of the others."""

    def __init__(self, lines: Sequence[str], scores: Scores) -> None:
        super().__init__("; ".join(lines))
        self.scores = scores

    def __reduce__(self) -> Any:  # else pickle would pass the message alone
        return Refused, ([str(self)], self.scores)


@kept_generators()
def evaluate(
    backbone: str | Path | Run,
    *,
    train: str | Path | None = None,
    test: str | Path | None = None,
    protocols: str | Sequence[str] = ("knn", "linear"),
    coco: str | Path | None = None,
    masks: str | Path | None = None,
    davis: str | Path | None = None,
    suite: str | Path | None = None,
    architecture: str | None = None,
    untrained: bool = False,
    workers: int = 0,
    gpus: bool = False,
    out: str | Path | None = None,
    plugins: Sequence[str | Path] = (),
    **settings: Any,
) -> Scores:
    """Evaluate a backbone with one or several protocols, and return the scores by name.

    `backbone` is a run, a checkpoint, `timm:NAME`, `untrained:NAME`, or a file of tensors. For a file of tensors,
    `architecture` is the timm name of the network. `train` is the labelled training data, and `test` is the test data.
    Without `test`, a tenth of `train` is held out. Some protocols instead read the folders or s3:// URLs `coco`,
    `masks`, `davis` or `suite`. With `untrained=True`, `evaluate` also evaluates an untrained backbone of the same
    architecture. `workers` is the number of Ray workers that share the work; 0 runs all work in this process.
    `gpus=True` gives each worker a GPU. Further keyword arguments are settings of all protocols, such as `k=10`, or of
    one protocol, such as `**{"linear.epochs": 10}`. `plugins` lists files and modules to load, such as the one of the
    run's method. `evaluate` stores all results in results.json in the folder `out`, by default the run's.

    Raises UserError if the backbone, the data or a setting is wrong. If some protocols cannot be run, `evaluate`
    finishes the others and then raises Refused, a subclass of UserError.

    Example:

        scores = eagleray.evaluate("runs/a", train="shards/", protocols=["knn"], k=5)
        scores["knn/top1"]
        print(scores)
    """
    folders = {"coco": coco, "masks": masks, "davis": davis, "suite": suite}
    loading.use(plugins)
    names = [p.strip() for p in (protocols.split(",") if isinstance(protocols, str) else protocols)]
    check_gpus(gpus, workers)
    check_asked(names, settings)
    check_backbone(os.fspath(backbone), architecture)
    for data in (train, test):
        if data:
            check_data(os.fspath(data))
    if workers:
        await_room(gpus)
    say_loading()
    from eagleray.evaluation import evaluate as evaluation

    request = evaluation.Request(
        backbone=os.fspath(backbone),
        protocols=names,
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
