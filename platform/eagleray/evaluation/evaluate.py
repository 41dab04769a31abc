"""Run protocols on a backbone, with features that are extracted once for all of them, and store every result."""

import datetime
import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from eagleray import config
from eagleray.base import devices
from eagleray.base.console import print_error, say
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.config import plugins
from eagleray.data.digests import data_digest
from eagleray.data.index import Index, Note, open_index
from eagleray.data.labels import unread_labels
from eagleray.engine import world
from eagleray.evaluation import on_workers, results
from eagleray.evaluation.extraction import Task, features
from eagleray.evaluation.results import UNTRAINED, Result, Row
from eagleray.evaluation.target import Target, check_crop, load_target
from eagleray.models.token_linear import on_device
from eagleray.protocols import feature_types
from eagleray.protocols.digests import digest, tree_digest
from eagleray.protocols.eval_mode import check_images, check_patches
from eagleray.protocols.features import LabelledFeatures, labelled_samples
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.probes import ProbeSets
from eagleray.protocols.protocol import DATA_OPTIONS, EXTRACTION, RGB_ONLY, Protocol
from eagleray.protocols.registry import PROTOCOLS, select
from eagleray.runs import layout, mlflow_run, tracking
from eagleray.runs.run_store import run_store
from eagleray.storage import store
from eagleray.storage.folder_copy import local_folder


@dataclass(frozen=True)
class Request:
    """The options of one `eagleray evaluate` command."""

    backbone: str
    protocols: Sequence[str]
    train: str | None = None
    test: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)  # by option: coco, masks, davis, frames, suite
    # SETTING, for all protocols that have it, or PROTOCOL.SETTING
    settings: Mapping[str, str] = field(default_factory=dict)
    architecture: str | None = None  # timm's name, for a file of tensors
    untrained: bool = False  # evaluate the untrained architecture too
    workers: int = 0  # Ray tasks or ranks that share the work; 0: this process
    gpus: bool = False  # whether each of them has a GPU
    out: str | None = None  # folder of the results

    def data(self, protocol: Protocol) -> dict[str, str]:
        """Return the URLs and folders that a protocol reads, by the name of their option; paths are absolute."""
        urls = {"train": self.train, "test": self.test} if {"labels", "labelled"} & {*protocol.needs} else {}
        urls |= {"test" if self.test else "train": self.test or self.train} if "images" in protocol.needs else {}
        folders = {n: self.folders.get(n) for n in protocol.needs if n in self.folders}
        return {k: store.absolute(v) for k, v in (urls | folders).items() if v}

    def settings_of(self, name: str) -> dict[str, str]:
        """Return the settings for one protocol: those given for all, replaced by those given for this one."""
        shared = {k: v for k, v in self.settings.items() if k in PROTOCOLS[name].settings}
        return shared | {k.removeprefix(f"{name}."): v for k, v in self.settings.items() if k.startswith(f"{name}.")}


@dataclass
class Report:
    """The results of a request in the order of the protocols, the reasons for failures, and the rows of the table."""

    results: list[Result] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    folder: str = ""
    untrained: bool = False  # whether the backbone that the request names has random weights


def evaluate(request: Request, note: Note | None = None) -> Report:
    """Run the protocols of a request one after the other and return their results.

    If a protocol cannot run, a line says why, and the others continue.

    Raises UserError when the backbone cannot be loaded, a setting is unknown or the results cannot be written."""
    note = note or say
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
    report.folder, report.untrained = folder(request, targets[0]), targets[0].untrained
    results.load(report.folder)  # a broken file is refused before anything is computed
    for target in targets:
        evaluation = Evaluation(request, target, names, report, note)
        for name in names:
            evaluation.run_or_refuse(name)
    known = results.load(report.folder)
    report.rows = list(results.rows(report.results, known, targets[0].published))
    log_to_mlflow(report, targets[0], note)
    return report


def refuse(report: Report, line: str) -> None:
    """Print the line that says why a protocol cannot run, and add it to the report."""
    print_error(line)
    report.refused.append(line)


def check_settings(names: Sequence[str], settings: Mapping[str, str]) -> None:
    """Raise UserError for a setting that none of the protocols has."""
    known = sorted({s for name in names for s in PROTOCOLS[name].settings})
    known += [f"{name}.{s}" for name in names for s in PROTOCOLS[name].settings]
    for key in settings:
        if key not in known:
            raise UserError(f"--{key}: not a setting of {', '.join(names)}{config.nearest(key, known)}")


def folder(request: Request, target: Target) -> str:
    """Return the folder for results.json: that of `--out`, the folder of the run, or one named after the backbone.

    Raises UserError when the folder cannot be written."""
    name = re.sub(r"[^\w.-]+", "-", target.name.removeprefix("untrained:").removeprefix("timm:")).strip("-")
    url = store.absolute((request.out or target.run or f"evaluations/{name}").rstrip("/"))
    try:
        store.check_writable(url)
        (view := run_store(url).view).mkdir(parents=True, exist_ok=True)
        if not os.access(view, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as e:
        raise UserError(f"--out {url}: cannot be written: {e.strerror or e}") from None
    return url


@dataclass
class Evaluation:
    """The evaluation of one backbone with all protocols."""

    request: Request
    target: Target
    names: Sequence[str]
    report: Report
    note: Note

    def run_or_refuse(self, name: str) -> None:
        """Run a protocol and store its result, or print in one line why it cannot run, or where it failed."""
        try:
            self.run(name, PROTOCOLS[name])
        except UserError as e:
            message = str(e)
            refuse(self.report, message if message.startswith(f"{name}:") else f"{name}: {message}")
        except Outage:
            raise
        except Exception as e:  # such as of a plug-in; the other protocols go on
            frame = traceback.extract_tb(e.__traceback__)[-1]
            at = f"{Path(frame.filename).name}, line {frame.lineno}"
            refuse(self.report, f"{name}: failed: {type(e).__name__}: {one_line(e)} ({at})")

    def run(self, name: str, protocol: Protocol) -> None:
        """Run a protocol and store its result.

        Raises UserError when the command lacks data that the protocol needs, or the protocol cannot run with this
        backbone or this data."""
        for need in protocol.needs:
            self.check(need)
        settings = self.settings(name, protocol)
        plugin = plugins.plugin_of(name, "protocol")
        result = Result(
            protocol=name,
            plugin=asdict(plugin) if plugin else None,
            asked=settings,
            backbone=self.target.name,
            untrained=self.target.untrained,
            backbone_digest=self.target.digest,  # computed first, in case the protocol changes the weights
            architecture=self.target.architecture,
            data=self.request.data(protocol),
            **results.NOT_RUN,
        )
        began = time.monotonic()
        arguments = {k: v for k, v in settings.items() if k in protocol.parameters}
        if protocol.frozen:
            outcome, data = self.run_on_features(result, protocol, settings, arguments)
        else:
            outcome, data = self.run_on_backbone(result, protocol, arguments)
        run = run_store(self.report.folder)
        result = replace(
            result,
            numbers={k: v if isinstance(v, int) else float(v) for k, v in outcome.numbers.items()},
            settings=outcome.settings,
            data_digest=data,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - began, 1),
            pictures=[os.path.relpath(p, run.view) for p in outcome.pictures],
        )
        for path in (*outcome.pictures, *outcome.tables):
            run.share(path)
        results.add(self.report.folder, result)
        self.report.results.append(result)

    def check(self, need: str) -> None:
        """Raise UserError when the command lacks the kind of data `need`, which a protocol requires."""
        r = self.request
        available: dict[str, Any] = {"labels": r.train, "labelled": r.train, "images": r.train or r.test}
        available |= {"patches": "any", **r.folders}
        if not available.get(need):
            raise UserError(f"needs {DATA_OPTIONS[need]}")
        if self.target.channels and need in RGB_ONLY:
            raise UserError(f"reads red, green and blue, not the backbone's {len(self.target.channels)} data.channels")

    def settings(self, name: str, protocol: Protocol) -> dict[str, Any]:
        """Return the settings of a protocol.

        The recipe's settings are replaced by those that the protocol presets, and both by those of the command line.

        Raises UserError for a value that does not have the type of its setting."""
        e = self.target.settings
        settings = e.of(name)
        if protocol.frozen:
            settings |= {"size": e.size, "resize": e.resize, "features": protocol.features}
        required = [p.name for p in protocol.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        settings |= {k: v for k, v in (("size", e.size), ("resize", e.resize)) if k in required}
        options = self.request.settings_of(name)
        if "size" in options and "resize" in settings and "resize" not in options:
            settings["resize"] = round(settings["resize"] * protocol.parse(options)["size"] / settings["size"])
        settings |= protocol.parse({**protocol.preset, **options})
        if isinstance(keys := settings.get("labels"), str):  # a file, which workers have to find
            settings["labels"] = store.absolute(keys)
        check_crop(settings.get("size", 0), settings.get("resize", settings.get("size", 0)))
        return settings

    def run_on_backbone(self, new: Result, protocol: Protocol, arguments: dict[str, Any]) -> tuple[Outcome, str]:
        """Run a protocol on the backbone itself; return its outcome and the digest of its data."""
        name = new.protocol
        # The workers have the GPUs, where another copy would be in their way.
        backbone = on_device(self.target.backbone, devices.CPU if self.request.workers else world.local().device)
        parameter = protocol.parameters.get("size")
        size = arguments.get("size", parameter.default if parameter else self.target.settings.size)
        inputs: list[Any] = []
        data, copies = "", {}
        for need in protocol.needs:
            if need == "patches":
                check_patches(backbone, size)
            elif need == "images":
                if "patches" not in protocol.needs:
                    check_images(backbone, size)
                inputs.append(self.images)
                data = data_digest(self.images, np.arange(len(self.images)))
            elif need == "labelled":
                inputs.append(self.sets)
                data = self.sets.digest
            else:
                url = store.absolute(self.request.folders[need])
                inputs.append(local_folder(url, self.note))
                copies[str(inputs[-1])] = url
                data = tree_digest(inputs[-1])
        out = results.picture_folder(self.report.folder, new)
        inside = out.relative_to(run_store(self.report.folder).view)
        # A training has its checkpoints in the store, so that it continues on any machine.
        extra: dict[str, Any] = {"out": out, "note": self.note, "checkpoints": f"{self.report.folder}/{inside}"}
        run: Any = protocol.run
        if workers := self.request.workers:
            architecture, gpus, urls = self.request.architecture, self.request.gpus, tuple(copies.values())
            one, shards = self.target, {k: v for k, v in self.request.data(protocol).items() if k in ("train", "test")}
            what = (one.name, architecture, one.digest, name, urls, arguments, gpus, shards)
            job = on_workers.Job(*what, one.channels, store.absolute(self.report.folder))
            extra["elsewhere"] = partial(on_workers.measure_videos, job, workers)
            if "elsewhere" not in protocol.parameters:
                run = partial(on_workers.run_on_ranks, job, workers if protocol.ranks else 1, **extra)
        extra = {k: v for k, v in extra.items() if k in protocol.parameters}
        try:
            outcome = on_workers.outcome_of(run(backbone, *inputs, **arguments, **extra))
        except UserError as e:  # names files of the copy
            message = str(e)
            for copy, url in copies.items():
                message = message.replace(copy, url.rstrip("/"))
            raise UserError(message) from None
        return replace(outcome, settings={**arguments, **outcome.settings}), data

    def run_on_features(
        self, new: Result, protocol: Protocol, settings: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[Outcome, str]:
        """Run a protocol on frozen features; return its outcome and the digest of its data."""
        name = new.protocol
        size, resize, kind = settings["size"], settings["resize"], settings["features"]
        if "labels" in protocol.needs:
            _ = self.sets  # labels are checked before the backbone is
        feature_types.check(self.target.backbone, kind, size)
        arguments = {k: v for k, v in arguments.items() if k not in EXTRACTION}
        if "out" in protocol.parameters:
            arguments["out"] = results.picture_folder(self.report.folder, new)
        bank = self.target.settings.bank
        extraction: dict[str, Any] = {"features": kind, "size": size, "resize": resize, "crops": "centre"}
        extraction |= {"bank": bank} if bank != "fp32" else {}
        common: dict[str, Any] = {"size": size, "resize": resize, "gpus": self.request.gpus, "bank": bank}
        common |= {"backbone": self.target.name, "digest": self.target.digest}
        common |= {"architecture": self.request.architecture, "channels": self.target.channels}
        common["spare"] = store.absolute(self.report.folder)
        if self.request.workers and not protocol.ranks:
            self.note(f"{name}: the workers extract its features, and this process computes the rest")
        if "suite" in protocol.needs:
            root = self.request.folders["suite"]
            digests: list[str] = []

            def features_of(url: str) -> LabelledFeatures:
                index = self.open(url)
                samples = labelled_samples(index)
                digests.append(data_digest(index, samples))
                return self.features(index, Task(**common, url=url, samples=samples, kinds=[kind]))[kind]

            extra = {"note": self.note, "model": self.target.network.name}
            extra = {k: v for k, v in extra.items() if k in protocol.parameters}
            outcome = protocol.run(features_of, root, **extra, **arguments)
            return replace(outcome, settings={**extraction, **outcome.settings}), digest(sorted(digests))
        sets, urls = self.sets, (self.request.train or "", self.request.test or self.request.train or "")
        kinds = self.kinds(size, kind)
        training, testing = (
            Task(**common, url=store.absolute(url), samples=samples, kinds=kinds)
            for url, samples in zip(urls, (sets.train_samples, sets.test_samples), strict=True)
        )
        if self.request.workers and protocol.ranks:
            job = on_workers.FeatureJob(name, kind, training, testing, arguments)
            outcome, images = on_workers.run_on_shares(job, self.request.workers, self.note)
        else:
            train, test = self.features(sets.train, training)[kind], self.features(sets.test, testing)[kind]
            outcome, images = on_workers.run_on_own(name, train, test, world.local().device, arguments, self.note)
        if not all(images):
            option = "--test" if images[0] and self.request.test else "--train"
            url = urls[option == "--test"]
            raise UserError(f"{option} {url}: none of the labelled images in these shards decodes")
        extraction |= {"train_images": images[0], "test_images": images[1]}
        return replace(outcome, settings={**outcome.settings, **extraction}), sets.digest

    def kinds(self, size: int, kind: str) -> list[str]:
        """Return the types of features to extract in one forward pass: `kind`, and those that other protocols need.

        The other protocols are those of the same command that use the same images."""
        wanted = [kind]
        for name in self.names:
            other = self.request.settings_of(name).get("features", PROTOCOLS[name].features)
            new = "labels" in PROTOCOLS[name].needs and other not in wanted
            if new and feature_types.has(self.target.backbone, other, size):
                wanted.append(other)
        return wanted

    def features(self, index: Index, task: Task) -> dict[str, LabelledFeatures]:
        """Return the features of a task's samples of the index, from the cache or extracted now."""
        return features(self.target, index, task, workers=self.request.workers, note=self.note)

    @cached_property
    def sets(self) -> ProbeSets:
        """The labelled images of `--train` and `--test`. Raises UserError when a
        classifier cannot be trained and tested on them."""
        tested = self.open(self.request.test) if self.request.test else None
        assert self.request.train
        sets = ProbeSets.of(self.open(self.request.train), tested, None)
        if sets is None:
            raise UserError(f"--train {self.request.train}: these shards have no labels, and this protocol needs them")
        sets.check()
        for unread in filter(None, map(unread_labels, {id(i): i for i in (sets.train, sets.test)}.values())):
            self.note(f"{unread}, and are left out")
        return sets

    @cached_property
    def images(self) -> Index:
        """The index of the images for protocols without labels."""
        return self.open(self.request.test or self.request.train or "")

    def open(self, url: str) -> Index:
        """Open the index of the shards at a URL.

        If the index cannot be written beside the shards, it is written to the folder of results."""
        return open_index(url, self.report.folder, note=self.note, channels=self.target.channels)


def log_to_mlflow(report: Report, target: Target, note: Note) -> None:
    """Log the numbers and results.json to the MLflow run in which the backbone was trained, if there is one."""
    if not target.run or not report.results:
        return
    metrics = {
        f"evaluation/{r.protocol}{'_untrained' * r.untrained}/{k.partition('/')[2] or k}": v
        for r in report.results
        for k, v in r.numbers.items()
    }
    run = run_store(target.run).view
    try:
        copy = run_store(report.folder).fetch() / results.NAME
        mlflow_run.update(tracking.tracking_of(run), run / layout.MLFLOW, metrics, [copy])
    except (UserError, Outage) as why:
        note(f"the numbers were not logged to MLflow: {why}; they are in {report.folder}/{results.NAME}")
