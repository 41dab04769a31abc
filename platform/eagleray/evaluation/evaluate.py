"""Run `eagleray evaluate`: extract features once for all protocols, run each protocol, and add its result to a file."""

import datetime
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleray import config
from eagleray.base.console import out, print_error
from eagleray.base.errors import UserError
from eagleray.data.index import Index, Note, open_index
from eagleray.engine import world
from eagleray.evaluation import results
from eagleray.evaluation.extraction import Task, features
from eagleray.evaluation.results import UNTRAINED, Result, Row
from eagleray.evaluation.target import Target, load_target
from eagleray.protocols import feature_types
from eagleray.protocols.digests import data_digest, digest, tree_digest
from eagleray.protocols.eval_mode import check_images, check_patches
from eagleray.protocols.features import LabelledFeatures, labelled_samples
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.probes import ProbeSets, renumber
from eagleray.protocols.protocol import DATA_OPTIONS, EXTRACTION, Protocol
from eagleray.protocols.registry import PROTOCOLS, select
from eagleray.runs import layout, remote, tracking
from eagleray.storage import store
from eagleray.storage.store import is_remote


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    backbone: str
    protocols: Sequence[str]
    train: str | None = None
    test: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)  # by name: coco, masks, davis, suite
    settings: Mapping[str, str] = field(
        default_factory=dict
    )  # by name, for all protocols that have it, or PROTOCOL.SETTING
    architecture: str | None = None
    untrained: bool = False  # evaluate the untrained architecture too
    workers: int = 0
    out: str | None = None

    def data(self, protocol: Protocol) -> dict[str, str]:
        """The data options of a protocol, with absolute paths."""
        urls = {"train": self.train, "test": self.test} if "labels" in protocol.needs else {}
        urls |= {"test" if self.test else "train": self.test or self.train} if "images" in protocol.needs else {}
        given = urls | {n: self.folders.get(n) for n in protocol.needs if n in ("coco", "masks", "davis", "suite")}
        return {k: store.absolute(v) for k, v in given.items() if v}

    def own(self, name: str) -> dict[str, str]:
        """The settings for a protocol; those for it alone replace those for all."""
        having = {k: v for k, v in self.settings.items() if k in PROTOCOLS[name].settings}
        return having | {k.removeprefix(f"{name}."): v for k, v in self.settings.items() if k.startswith(f"{name}.")}


@dataclass
class Report:
    """The results of a request in the order of the protocols, its errors, and the rows of the table."""

    results: list[Result] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    folder: str = ""


def evaluate(request: Request, note: Note | None = None) -> Report:
    """Run the protocols one after the other. If one cannot run, a line says why and the others continue.

    Raises UserError when the backbone, the settings or the folder of results are wrong."""
    note = note or (lambda line: out.print(line, markup=False))
    names, refused = select(request.protocols)
    report = Report()
    for line in refused:
        refuse(report, line)
    if not names:
        return report
    check_settings(names, request.settings)
    targets = [load_target(request.backbone, request.architecture)]
    if request.untrained and not targets[0].untrained:
        bare = f"timm:{request.architecture}" if request.architecture else request.backbone
        targets.append(load_target(UNTRAINED + bare))
    report.folder = folder(request, targets[0])
    results.load(report.folder)  # refused before anything is computed
    for one in targets:
        work = Work(request, one, names, report, note)
        for name in names:
            work.try_one(name)
    every = results.load(report.folder)
    report.rows = list(results.rows(report.results, every, published(targets[0])))
    tell_mlflow(report, targets[0], note)
    return report


def refuse(report: Report, line: str) -> None:
    print_error(line)
    report.refused.append(line)


def check_settings(names: Sequence[str], given: Mapping[str, str]) -> None:
    """Raises UserError for a setting that none of the protocols has."""
    known = sorted({s for name in names for s in PROTOCOLS[name].settings})
    known += [f"{name}.{s}" for name in names for s in PROTOCOLS[name].settings]
    for key in given:
        if key not in known:
            raise UserError(f"--{key}: no setting of {', '.join(names)}{config.nearest(key, known)}")


def folder(request: Request, one: Target) -> str:
    """Return the folder of the results: that of the run, or one named after the backbone.

    Raises UserError when it cannot be written."""
    name = re.sub(r"[^\w.-]+", "-", one.given.removeprefix("untrained:").removeprefix("timm:")).strip("-")
    found = store.absolute((request.out or one.run or f"evaluations/{name}").rstrip("/"))
    try:
        remote.view(found).mkdir(parents=True, exist_ok=True)
        if not is_remote(found) and not os.access(found, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as e:
        raise UserError(f"--out {found}: cannot be written: {e.strerror or e}") from None
    return found


@dataclass
class Work:
    """The evaluation of one backbone with all protocols."""

    request: Request
    target: Target
    names: Sequence[str]
    report: Report
    note: Note

    def try_one(self, name: str) -> None:
        """Run a protocol and add its result, or say in a line why it cannot run."""
        try:
            self.one(name, PROTOCOLS[name])
        except UserError as e:
            said = str(e)
            refuse(self.report, said if said.startswith(f"{name}:") else f"{name}: {said}")

    def one(self, name: str, protocol: Protocol) -> None:
        for need in protocol.needs:
            self.check(need)
        asked, weights = self.asked(name, protocol), self.target.digest  # of before, should a protocol train
        began = time.monotonic()
        own = {k: v for k, v in asked.items() if k in protocol.parameters}
        found, data = self.frozen(protocol, asked, own) if protocol.frozen else self.direct(protocol, own)
        result = Result(
            protocol=name,
            numbers={k: v if isinstance(v, int) else float(v) for k, v in found.numbers.items()},
            settings=found.settings,
            asked=asked,
            backbone=self.target.given,
            untrained=self.target.untrained,
            backbone_digest=weights,
            architecture=self.target.architecture,
            data=self.request.data(protocol),
            data_digest=data,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - began, 1),
            pictures=[os.path.relpath(p, remote.view(self.report.folder)) for p in found.pictures],
        )
        if is_remote(self.report.folder):
            for path, kept in zip(found.pictures, result.pictures, strict=True):
                store.put_bytes(f"{self.report.folder}/{kept}", path.read_bytes())
        results.add(self.report.folder, result)
        self.report.results.append(result)

    def check(self, need: str) -> None:
        r = self.request
        there: dict[str, Any] = {"labels": r.train, "images": r.train or r.test, "patches": "any", **r.folders}
        if not there.get(need):
            raise UserError(f"needs {DATA_OPTIONS[need]}")

    def asked(self, name: str, protocol: Protocol) -> dict[str, Any]:
        """Return the settings: those of the recipe, replaced by those of the protocol and then of the command line."""
        e = self.target.settings
        own = e.of(name)
        if protocol.frozen:
            own |= {"size": e.size, "resize": e.resize, "features": protocol.features}
        bare = [p.name for p in protocol.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        own |= {k: v for k, v in (("size", e.size), ("resize", e.resize)) if k in bare}
        given = self.request.own(name)
        if "size" in given and "resize" in own and "resize" not in given:
            own["resize"] = round(own["resize"] * protocol.parse(given)["size"] / own["size"])
        full = own | protocol.parse({**protocol.preset, **given})
        if full.get("resize", full.get("size", 0)) < full.get("size", 0):
            raise UserError(f"--resize {full['resize']}: leaves no room for a crop of --size {full['size']}")
        return full

    def direct(self, protocol: Protocol, asked: dict[str, Any]) -> tuple[Outcome, str]:
        """Run a protocol on the backbone itself; return its outcome and the digest of its data."""
        backbone = self.target.backbone.to(world.local().device)
        fallen = protocol.parameters.get("size")
        size = asked.get("size", fallen.default if fallen else self.target.settings.size)
        given: list[Any] = []
        data = ""
        for need in protocol.needs:
            if need == "patches":
                check_patches(backbone, size)
            elif need == "images":
                if "patches" not in protocol.needs:
                    check_images(backbone, size)
                given.append(self.images)
                data = data_digest(self.images, np.arange(len(self.images)))
            else:
                given.append(Path(self.request.folders[need]))
                data = tree_digest(given[-1])
        pictures = remote.view(self.report.folder) / "pictures" / ("untrained" if self.target.untrained else "")
        pictures.mkdir(parents=True, exist_ok=True)
        known = {"out": pictures, "note": self.note}
        found: Any = protocol.run(
            backbone, *given, **asked, **{k: v for k, v in known.items() if k in protocol.parameters}
        )
        if not isinstance(found, Outcome):
            found = Outcome(found)
        return replace(found, settings={**asked, **found.settings}), data

    def frozen(self, protocol: Protocol, asked: dict[str, Any], own: dict[str, Any]) -> tuple[Outcome, str]:
        """Run a protocol on frozen features; return its outcome and the digest of its data."""
        size, resize, kind = asked["size"], asked["resize"], asked["features"]
        if "labels" in protocol.needs:
            _ = self.sets  # refused at once where there is nothing to learn from
        feature_types.check(self.target.backbone, kind, size)
        own = {k: v for k, v in own.items() if k not in EXTRACTION}
        own |= {"note": self.note} if "note" in protocol.parameters else {}
        how: dict[str, Any] = {"features": kind, "size": size, "resize": resize, "crops": "centre"}
        if "suite" in protocol.needs:
            root = self.request.folders["suite"]
            seen: list[str] = []

            def of(url: str) -> LabelledFeatures:
                index = self.opened(url)
                seen.append(data_digest(index, labelled_samples(index)))
                return self.features(index, url, labelled_samples(index), size, resize, [kind])[kind]

            found = protocol.run(of, root, **own)
            return replace(found, settings={**how, **found.settings}), digest(sorted(seen))
        sets = self.sets
        wanted = self.kinds(size, kind)
        train, test = (
            self.features(index, url, samples, size, resize, wanted)[kind]
            for index, url, samples in (
                (sets.train, self.request.train or "", sets.train_samples),
                (sets.test, self.request.test or self.request.train or "", sets.test_samples),
            )
        )
        if not len(train.y) or not len(test.y):
            raise UserError(f"--{'test' if len(train.y) else 'train'}: no image there decodes")
        found = protocol.run(*renumber(train, test, world.local().device), **own)
        how |= {"train_images": len(train.y), "test_images": len(test.y)}
        digests = [data_digest(sets.train, sets.train_samples), data_digest(sets.test, sets.test_samples)]
        return replace(found, settings={**found.settings, **how}), digest(digests)

    def kinds(self, size: int, kind: str) -> list[str]:
        """Return this type of features first, then those that other protocols of the request need of the same images,
        as one forward pass extracts them all."""
        wanted = [kind]
        for name in self.names:
            other = self.request.own(name).get("features", PROTOCOLS[name].features)
            new = "labels" in PROTOCOLS[name].needs and other not in wanted
            if new and feature_types.has(self.target.backbone, other, size):
                wanted.append(other)
        return wanted

    def features(
        self, index: Index, url: str, samples: NDArray[np.int64], size: int, resize: int, wanted: Sequence[str]
    ) -> dict[str, LabelledFeatures]:
        task = Task(self.target.given, self.request.architecture, url, samples, size, resize)
        return features(self.target, index, task, wanted, workers=self.request.workers, note=self.note)

    @cached_property
    def sets(self) -> ProbeSets:
        tested = self.opened(self.request.test) if self.request.test else None
        assert self.request.train
        sets = ProbeSets.of(self.opened(self.request.train), tested, None)
        if sets is None:
            raise UserError(f"--train {self.request.train}: no labels there, and this protocol needs them")
        sets.check()
        return sets

    @cached_property
    def images(self) -> Index:
        return self.opened(self.request.test or self.request.train or "")

    def opened(self, url: str) -> Index:
        return open_index(url, remote.view(self.report.folder), note=self.note)


def published(one: Target) -> dict[str, float]:
    """Return the paper's numbers for the recipe of a run."""
    if not one.run or not one.recipe:
        return {}
    try:
        command = json.loads((remote.view(one.run) / layout.ENVIRONMENT).read_text())["command"]
    except (OSError, ValueError, KeyError):
        return {}
    return results.published(command, config.to_plain(one.recipe))


def tell_mlflow(report: Report, one: Target, note: Note) -> None:
    """Add the numbers and results.json to the run's MLflow run, if it has one."""
    if not one.run or not report.results:
        return
    metrics = {
        f"evaluation/{r.protocol}{'_untrained' * r.untrained}/{k.partition('/')[2] or k}": v
        for r in report.results
        for k, v in r.numbers.items()
    }
    copy = remote.view(report.folder) / results.NAME
    if is_remote(report.folder):
        copy.write_text(remote.get(report.folder, results.NAME) or "")
    known = remote.view(one.run) / layout.MLFLOW
    if why := tracking.append(tracking.tracking_of(one.run), known, metrics, [copy]):
        note(f"the numbers are not in MLflow: {why}; {report.folder}/{results.NAME} has them")


def table(report: Report, form: str) -> str:
    if form == "json":
        return json.dumps([r.__dict__ for r in report.results], indent=1, default=str)
    return results.latex(report.rows) if form == "latex" else results.markdown(report.rows)
