"""Evaluate the backbone of a run on held-out images, during training and at its end, and compare with an untrained one.

A failed evaluation does not end the run: its scores are missing, and a finding in the log and the report says so."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleray.base import dist
from eagleray.base.errors import one_line
from eagleray.base.files import cache_folder, write_atomic
from eagleray.data.digests import data_digest
from eagleray.data.index import Index
from eagleray.engine.precision import exact_products
from eagleray.methods.method import Classifier
from eagleray.models.backbone import Backbone
from eagleray.models.token_linear import on_device
from eagleray.protocols.digests import digest, weights_digest
from eagleray.protocols.features import remaining_samples, subset
from eagleray.protocols.probes import ProbeSets, evaluate
from eagleray.protocols.settings import Evaluate
from eagleray.runs import layout
from eagleray.runs.background import side_work
from eagleray.runs.build import build_method
from eagleray.runs.health import FAILED_EVALUATION, Finding
from eagleray.runs.memory import explain_exhaustion
from eagleray.runs.metrics import (
    AT_START,
    CROPS_FOUND,
    CROPS_LIDAR,
    KNN_TOP1,
    LIDAR_ERROR,
    LINEAR_TOP1,
    START_KNN,
    START_RANK,
    UNTRAINED,
)
from eagleray.runs.plan import Plan
from eagleray.runs.rank_run import RankRun
from eagleray.runs.verdicts import judge, verdicts

log = logging.getLogger(__name__)
STARTS = 2  # number of deaths of the process in an evaluation after which the run goes on without it

ONLINE = 1_300_000, 50_000  # most training and most test images of an evaluation during training: those of ImageNet-1k
DRAWN_FROM = 500  # most images from which the picture of nearest neighbours is drawn
MOST_CROPPED = 1000  # most images whose two crops are compared: enough to notice a difference of 4.5 percentage points
SAID = (KNN_TOP1, LINEAR_TOP1, CROPS_FOUND, START_KNN, START_RANK)  # scores at the start that are logged
COMPARED = (KNN_TOP1, LINEAR_TOP1, CROPS_FOUND, CROPS_LIDAR, LIDAR_ERROR)  # scores that the verdict compares
SHOWN = {"knn top-1": KNN_TOP1, "linear top-1": LINEAR_TOP1, "crops found": CROPS_FOUND, "LiDAR": CROPS_LIDAR}
BASELINES = "untrained"  # the folder of this machine's cache with the scores of untrained backbones
BASELINE_FORMAT = 1  # version of the stored scores, increased when evaluations compute other scores

Scores = dict[str, float]


@dataclass(frozen=True)
class Probed:
    """The images of an evaluation with labels, on which kNN and a linear probe are measured."""

    sets: ProbeSets

    @property
    def count(self) -> int:
        """Return the number of test images, of which each score is a share."""
        return len(self.sets.test_samples)

    @property
    def drawn(self) -> tuple[Index, NDArray[np.int64]]:
        """Return the images for the picture of nearest neighbours: an index, and their positions (n,) in it."""
        return self.sets.test, self.sets.test_samples

    @property
    def about(self) -> str:
        return f"kNN and a linear probe on {self.count:,} test images, trained and untrained"

    @property
    def digests(self) -> list[str]:
        """Return a digest of the training and one of the test images, with labels. Equal images give equal digests."""
        parts = (self.sets.train, self.sets.train_samples), (self.sets.test, self.sets.test_samples)
        return [data_digest(index, samples) for index, samples in parts]

    def describe(self, settings: Evaluate, protocol: str) -> str:
        return self.sets.describe(settings, protocol)

    def scores(self, backbone: Backbone, settings: Evaluate, **how: Any) -> dict[str, float]:
        """Return the scores of a backbone. `how` is as returned by `RankRun.embedding`: precision and reading."""
        return evaluate(backbone, self.sets, settings, **how)


@dataclass(frozen=True)
class Unlabelled:
    """The images of an evaluation without labels: those of `data.test`, else a fixed sample of the training images."""

    index: Index
    samples: NDArray[np.int64]
    name: str

    @property
    def count(self) -> int:
        return len(self.samples)

    @property
    def drawn(self) -> tuple[Index, NDArray[np.int64]]:
        return self.index, self.samples

    @property
    def about(self) -> str:
        return (
            f"how often a second crop finds its own image, as there are no labels: {self.count:,} {self.name} images, "
            "trained and untrained"
        )

    @property
    def digests(self) -> list[str]:
        return [data_digest(self.index, self.samples)]

    def describe(self, settings: Evaluate, protocol: str) -> str:
        guess = f", of which a guess finds {100 / max(self.count, 1):.1f} %" * (protocol == "crops")
        return f"{self.count} {self.name} images{guess}"

    def scores(self, backbone: Backbone, settings: Evaluate, **how: Any) -> dict[str, float]:
        from eagleray.protocols.crop_retrieval import measure_crops

        found = measure_crops(backbone, self.index, self.samples, size=settings.size, resize=settings.resize, **how)
        return dict(zip((CROPS_FOUND, CROPS_LIDAR, LIDAR_ERROR), found, strict=True)) if found else {}


HeldOut = Probed | Unlabelled


def held_out(plan: Plan) -> HeldOut:
    """Return the images on which the backbone of a run is measured at its end. Training may have used them as well."""
    if sets := ProbeSets.of(plan.index, plan.test, plan.recipe.evaluate.limit):
        return Probed(sets)
    index = plan.test or plan.index
    return Unlabelled(index, subset(remaining_samples(index), MOST_CROPPED), "test" if plan.test else "training")


def online(run: RankRun, step: int, starts: int = 1) -> Scores:
    """Return the scores of an evaluation during training: of a classifier on the test set, else of kNN. They are empty
    if the evaluation fails. `starts` is how often it has begun, this time included."""

    def measure() -> Scores:
        give_up_after_deaths(starts)
        if isinstance(run.method, Classifier):
            return evaluate_classifier(run, run.method)
        e = run.plan.recipe.evaluate
        return evaluate(run.export(), online_sets(run, step), e, protocols=("knn",), **run.embedding)

    return announced(run, attempt(run, step, measure))


def online_sets(run: RankRun, step: int) -> ProbeSets | None:
    """Return the labelled images of an evaluation during training, at most ONLINE unless the recipe sets
    `evaluate.limit`; None without labels. If images are left out, the log of the first evaluation says so."""
    e, plan = run.plan.recipe.evaluate, run.plan
    sets = ProbeSets.of(plan.index, plan.test, e.limit)
    if sets is None or e.limit is not None:
        return sets
    part = sets.at_most(*ONLINE)
    shares = [
        f"{len(now)} of {len(all_)} {name} images"
        for name, now, all_ in (
            ("training", part.train_samples, sets.train_samples),
            ("test", part.test_samples, sets.test_samples),
        )
        if len(now) < len(all_)
    ]
    if shares and run.world.rank == 0 and step == e.every * plan.stream.steps_per_epoch:
        log.info(
            "evaluations during training use %s; evaluate.limit=N sets another number, the end uses all",
            " and ".join(shares),
        )
    return part


def at_start(run: RankRun, step: int) -> None:
    """Measure the backbone that the run starts from, as at the end of the run, and log and keep its scores. `step` is
    the number of steps so far: 0, unless `start.what=all` takes over the steps of the source."""
    guard, images = run.guard, held_out(run.plan)
    starts = dist.from_rank_zero(run.folder.starts_in_vain)

    def measure() -> Scores:
        give_up_after_deaths(starts)
        return images.scores(run.export(), run.plan.recipe.evaluate, **run.embedding)

    scores = attempt(run, step, measure)
    guard.scores = scores | run.compare_with_start(step)
    run.folder.log_start(guard.scores)
    if run.world.rank == 0:
        texts = [f"{name} {value:.4g}" for name, value in guard.scores.items() if name in SAID]
        log.info("the backbone that the run starts from: %s", ", ".join(texts))


def final(run: RankRun, backbone: Backbone, step: int, starts: int) -> Scores:
    """Return the scores at the end of the run, and log them. They are empty if the evaluation fails. Scores that are no
    better than those of the untrained backbone, or worse than at the start, may be findings (`judge`).

    `starts` is how often this evaluation has begun. Once the process has died in it twice, it is given up."""
    images = held_out(run.plan)

    def measure() -> Scores:
        give_up_after_deaths(starts)
        if isinstance(run.method, Classifier):
            return evaluate_classifier(run, run.method)
        return images.scores(backbone, run.plan.recipe.evaluate, **run.embedding)

    if run.world.rank == 0:
        log.info("evaluating %s", "the classifier" if isinstance(run.method, Classifier) else images.about)
    scores = attempt(run, step, measure)
    if scores and not isinstance(run.method, Classifier):
        untrained = attempt(run, step, partial(untrained_scores, run, images))
        same = run.guard.judged == run.guard.now
        if run.guard.scores and not same and run.world.rank == 0:
            log.info("not compared with the start, which was evaluated with other settings or images")
        for suffix, others in (UNTRAINED, untrained), (AT_START, run.guard.scores if same else {}):
            scores |= {name + suffix: others[name] for name in COMPARED if name in others}
        found = list(judge(scores, images.count, step))
        run.folder.note_findings(found)
        for finding in found if run.world.rank == 0 else ():
            run.world.show(asdict(finding), run.plan.steps)
    if run.world.rank == 0:
        log_scores(run, images, scores)
        draw_neighbours(run, images, backbone)
    return announced(run, scores)


def draw_neighbours(run: RankRun, images: HeldOut, backbone: Backbone) -> None:
    """Draw some images of the evaluation at the end of the run, each with its nearest neighbours. Images with other
    channels than red, green and blue cannot be shown, so nothing is drawn."""
    if run.plan.recipe.data.channels:
        return
    with side_work(f"{layout.NEIGHBOURS} was not drawn"):
        from eagleray.protocols.visual import neighbours  # It needs matplotlib, which may be missing.

        index, samples = images.drawn
        path, size = run.folder.path / layout.NEIGHBOURS, run.plan.recipe.evaluate.size
        neighbours.draw_neighbours(backbone, index, subset(samples, DRAWN_FROM), path, size=size, queries=6, k=7)


def verdict(run: RankRun, scores: Scores) -> list[str]:
    """Return what the scores at the end of the run say of its backbone, in sentences."""
    if isinstance(run.method, Classifier):
        return []
    said = verdicts(scores, held_out(run.plan).count)
    return said or ["not compared with an untrained backbone: the evaluation failed, or has no image"]


def give_up_after_deaths(starts: int) -> None:
    """Raises RuntimeError when the process has died STARTS times in an evaluation that has begun `starts` times."""
    if starts > STARTS:
        raise RuntimeError(f"the process died in it {starts - 1} times")


def log_scores(run: RankRun, images: HeldOut, scores: Scores) -> None:
    """Log the scores at the end of the run, or why there are none."""
    if isinstance(run.method, Classifier):
        if scores or run.plan.test is None:
            line = ", ".join(f"{name} {value:.2f} %" for name, value in scores.items())
            log.info("%s", line or "no data.test: no accuracy")
        return
    for name, key in SHOWN.items():
        if key in scores:
            others, unit = (("untrained", UNTRAINED), ("at the start", AT_START)), "" if key == CROPS_LIDAR else " %"
            before = "".join(f", {other} {scores[key + s]:.1f}{unit}" for other, s in others if key + s in scores)
            settings = images.describe(run.plan.recipe.evaluate, name.partition(" ")[0])
            log.info("%s %.1f%s%s (%s)", name, scores[key], unit, before, settings)


def announced(run: RankRun, scores: Scores) -> Scores:
    """Return the scores, after passing them to the callbacks unless they are empty."""
    if scores:
        run.folder.callbacks("evaluation", scores)
    return scores


def attempt(run: RankRun, step: int, measure: Callable[[], Scores]) -> Scores:
    """Return the scores that `measure` returns on all ranks, or none if it fails on any rank.

    Afterwards the ranks agree whether it has failed. If a rank has died, the agreement fails, and the run restarts."""
    error, scores = None, {}
    try:
        with exact_products(), explain_exhaustion(run.plan.recipe, run.method, run.world.size, evaluating=True):
            scores = measure()
    except Exception as e:
        error = e
        log.debug("the evaluation failed", exc_info=e)
    if run.world.agree(error is not None)[0]:
        what = f"{type(error).__name__}: {one_line(error)}" if error else "on another rank"
        run.folder.note_findings([Finding(step, FAILED_EVALUATION, f"its numbers are missing: {what}")])
        return {}
    return scores


def untrained_scores(run: RankRun, images: HeldOut) -> Scores:
    """Return the scores of the untrained backbone, with the recipe's random weights. They are computed once on a
    machine, and kept in its cache for further runs of the recipe."""
    recipe = run.plan.recipe
    backbone = on_device(build_method(recipe).export(), run.world.device)

    def read() -> tuple[Path, Scores] | None:
        if run.world.rank:
            return None
        path = cache_folder(BASELINES) / f"{baseline_digest(run, backbone, images)}.json"
        return path, read_baseline(path)

    path, known = dist.gather_objects(dist.together(read))[0]
    if known:
        return known
    scores = images.scores(backbone, recipe.evaluate, **run.embedding)
    if run.world.rank == 0:
        with side_work(f"{path}: the untrained scores cannot be kept", log.debug):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(scores))
    return scores


def read_baseline(path: Path) -> Scores:
    """Return the scores in a file, or none if it is missing or unreadable. An unreadable file is logged."""
    scores: Scores = {}
    if path.exists():
        with side_work(f"{path}: cannot be read, so the untrained backbone is evaluated again", log.info):
            scores = {str(name): float(value) for name, value in json.loads(path.read_bytes()).items()}
    return scores


def baseline_digest(run: RankRun, backbone: Backbone, images: HeldOut) -> str:
    """Return the digest of all that the scores of an untrained backbone depend on, such as its weights and images."""
    e = {name: value for name, value in asdict(run.plan.recipe.evaluate).items() if name not in ("every", "limit")}
    recipe = run.plan.recipe
    weights = weights_digest(backbone, recipe.backbone, *recipe.data.channels, *recipe.plugins)
    return digest(BASELINE_FORMAT, weights, images.digests, e, run.plan.recipe.precision, run.world.device.type)


def evaluate_classifier(run: RankRun, method: Classifier) -> Scores:
    """Return the classifier's scores on the test set. They are empty if the recipe has no test set."""
    plan = run.plan
    if plan.test is None:
        return {}
    from eagleray.protocols.classifier import classifier

    e, device = plan.recipe.evaluate, next(method.parameters()).device
    return classifier(method, plan.test, size=e.size, resize=e.resize, device=device, **run.embedding)
