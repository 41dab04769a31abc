"""Run protocols on a backbone, extract features once for all of them, and store every result."""

import datetime
import os
import re
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from eagleray.base import devices
from eagleray.base.console import print_error, say
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.base.files import writing
from eagleray.config import plugins
from eagleray.data.image_folder import check_outside
from eagleray.data.index import Note
from eagleray.engine import world
from eagleray.evaluation import results
from eagleray.evaluation.data import CommandSource
from eagleray.evaluation.on_workers import Job, Measurement, run_on_ranks
from eagleray.evaluation.registry import PROTOCOLS, check_asked, select
from eagleray.evaluation.results import UNTRAINED, Result, Row
from eagleray.evaluation.target import Inputs, Target, check_crop, load_target
from eagleray.models.token_linear import on_device
from eagleray.protocols.features import has_kind
from eagleray.protocols.needs import Features, Need
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import FeatureProtocol, Listed, Protocol, Workspace
from eagleray.runs import layout, mlflow_run, tracking
from eagleray.runs.background import side_work
from eagleray.runs.run_store import run_store
from eagleray.storage import store


@dataclass(frozen=True)
class Request:
    """The options of one `eagleray evaluate` command."""

    backbone: str
    protocols: Sequence[str]
    train: str | None = None
    test: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)  # folder or URL of data by option, such as coco or suite
    # Values of settings. The key SETTING is for all protocols with this setting, PROTOCOL.SETTING for one protocol.
    settings: Mapping[str, str] = field(default_factory=dict)
    architecture: str | None = None  # timm's name of the network, if the backbone is a file of tensors
    untrained: bool = False  # whether to evaluate the architecture with random weights, too
    workers: int = 0  # number of Ray tasks or ranks that share the work; 0: this process does it
    gpus: bool = False  # whether each worker has a GPU
    out: str | None = None  # folder or URL for the results

    @property
    def given(self) -> dict[str, str]:
        """The URLs and folders of the data of this command, by option."""
        given = {"train": self.train, "test": self.test, **self.folders}
        return {option: place for option, place in given.items() if place}

    def settings_of(self, name: str) -> dict[str, str]:
        """Return the settings of one protocol. Those given for this one replace those given for all protocols."""
        shared = {k: v for k, v in self.settings.items() if k in PROTOCOLS[name].settings}
        return shared | {k.removeprefix(f"{name}."): v for k, v in self.settings.items() if k.startswith(f"{name}.")}


@dataclass
class Report:
    """The results of a request in the order of its protocols, the messages of protocols that failed, and the rows of
    the printed table."""

    results: list[Result] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    folder: str = ""
    untrained: bool = False  # whether the backbone that the request names has random weights


def evaluate(request: Request, note: Note | None = None) -> Report:
    """Run the protocols of a request one after the other, and return their results.

    If a protocol cannot run, a line says why, and the other protocols continue. Raises UserError when the backbone
    cannot be loaded, a setting is unknown or the results cannot be written."""
    note = note or say
    names, refused = select(request.protocols)
    report = Report()
    for line in refused:
        refuse(report, line)
    if not names:
        return report
    check_asked(names, request.settings)
    targets = [load_target(request.backbone, request.architecture)]
    if request.untrained and not targets[0].untrained:
        bare = f"timm:{request.architecture}" if request.architecture else request.backbone
        targets.append(load_target(UNTRAINED + bare))
    report.folder, report.untrained = folder(request, targets[0]), targets[0].untrained
    check_outside(report.folder, map(store.absolute, filter(None, (request.train, request.test))), "--out ")
    if not (request.out or targets[0].run):
        note(f"results come into {report.folder}; --out names another folder")
    results.load(report.folder)  # raises before the work if results.json is damaged
    for target in targets:
        evaluation = Evaluation(request, target, names, report, note)
        for name in names:
            evaluation.run_or_refuse(name)
    known = results.load(report.folder)
    report.rows = list(results.rows(report.results, known, targets[0].published))
    log_to_mlflow(report, targets[0], note)
    return report


def refuse(report: Report, line: str) -> None:
    """Print a line that says why a protocol cannot run, and add it to the report."""
    print_error(line)
    report.refused.append(line)


def folder(request: Request, target: Target) -> str:
    """Return the folder or URL of results.json: `--out`, else the run's folder, else a folder named after the backbone.

    Raises UserError when it cannot be written."""
    full = target.name.removeprefix("untrained:").removeprefix("timm:")
    short = f"{PurePath(full).name}-{zlib.crc32(full.encode()):08x}" if full.startswith("/") else full
    name = re.sub(r"[^\w.-]+", "-", short).strip("-")
    url = store.absolute((request.out or target.run or f"evaluations/{name}").rstrip("/"))
    with writing(f"--out {url}"):
        store.check_writable(url)
        (view := run_store(url).view).mkdir(parents=True, exist_ok=True)
        if not os.access(view, os.W_OK):
            raise PermissionError(13, "permission denied")
    return url


@dataclass
class Evaluation:
    """The evaluation of one backbone with all protocols."""

    request: Request
    target: Target
    names: Sequence[str]
    report: Report
    note: Note

    @cached_property
    def source(self) -> CommandSource:
        """The source from which protocols open their data."""
        one, r = self.target, self.request
        inputs = Inputs(
            one.name,
            one.digest,
            r.architecture,
            one.network.name,
            given=r.given,
            urls={option: store.absolute(place) for option, place in r.given.items()},
            gpus=r.gpus,
            channels=one.channels,
            bank=one.settings.bank,
            spare=self.report.folder,
        )
        return CommandSource(inputs, one, r.workers, self.note)

    def run_or_refuse(self, name: str) -> None:
        """Run a protocol and store its result. If it cannot run or fails, print a line that says why or where."""
        try:
            self.run(name, PROTOCOLS[name])
        except UserError as e:
            message = str(e)
            for url, copy in self.source.copies.items():  # errors name files of local copies, while users know the URLs
                message = message.replace(str(copy), url.rstrip("/"))
            refuse(self.report, message if message.startswith(f"{name}:") else f"{name}: {message}")
        except Outage:
            raise
        except Exception as e:  # plug-ins may raise any error; the other protocols must continue
            frame = traceback.extract_tb(e.__traceback__)[-1]
            at = f"{Path(frame.filename).name}, line {frame.lineno}"
            refuse(self.report, f"{name}: failed: {type(e).__name__}: {one_line(e)} ({at})")

    def run(self, name: str, listed: Listed) -> None:
        """Run a protocol and store its result.

        Raises UserError when data that the protocol needs are missing, or it cannot run with this backbone or data."""
        named = self.named(listed.default.data())
        asked = self.settings(name, listed)
        protocol = listed.kind(**asked)
        plugin = plugins.plugin_of(name, "protocol")
        result = Result(
            protocol=name,
            plugin=asdict(plugin) if plugin else None,
            asked=asked,
            backbone=self.target.name,
            untrained=self.target.untrained,
            backbone_digest=self.target.digest,  # computed now, as the protocol may change the weights
            architecture=self.target.architecture,
            data={option: self.source.inputs.urls[option] for option in named},
            **results.NOT_RUN,
        )
        began = time.monotonic()
        with results.picture_folder(self.report.folder, result) as folder:
            outcome, data = self.measure(folder, result, Measurement(protocol, self.need(protocol), asked))
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

    def named(self, need: Need[Any]) -> dict[str, str]:
        """Return the URLs and folders of the data that a protocol needs, by option. Raises UserError when a required
        option is missing, or when the protocol needs red, green and blue but the backbone has other channels."""
        named = need.named(self.request.given)
        if self.target.channels and need.photographs:
            raise UserError(f"reads red, green and blue, not the backbone's {len(self.target.channels)} data.channels")
        return named

    def settings(self, name: str, listed: Listed) -> dict[str, Any]:
        """Return a protocol's settings. Options of the command override presets, and presets override the recipe.

        Raises UserError for values of a wrong type, and when the crop is larger than the resized image."""
        settings = listed.kind.of_recipe(self.target.settings)
        options = self.request.settings_of(name)
        if "size" in options and "resize" in settings and "resize" not in options:
            settings["resize"] = round(settings["resize"] * listed.parse(options)["size"] / settings["size"])
        settings = listed.parse({**settings, **listed.preset, **options})
        check_crop(settings.get("size", 0), settings.get("resize", settings.get("size", 0)))
        return settings

    def need(self, protocol: Protocol[Any]) -> Need[Any]:
        """Return the data that a protocol needs. If these are features, the types that the command's other protocols
        read are added, so that one forward pass extracts all types."""
        need = protocol.data()
        if not isinstance(need, Features):
            return need
        kinds = [need.kind]
        for name in self.names:
            other = PROTOCOLS[name].default
            if isinstance(other, FeatureProtocol):
                kind = self.request.settings_of(name).get("features", other.features)
                if kind not in kinds and has_kind(self.target.backbone, kind, need.size):
                    kinds.append(kind)
        return replace(need, kinds=tuple(kinds))

    def measure(self, folder: Path, new: Result, measurement: Measurement[Any]) -> tuple[Outcome, str]:
        """Run a protocol here or on workers, with a `folder` for pictures. Return the outcome and the data's digest."""
        protocol, need, workers = measurement.protocol, measurement.need, self.request.workers
        data = need.open(self.source)  # wrong data should raise before the backbone is moved to a device
        # With workers, this process keeps the backbone on the CPU, so as not to take memory of the workers' GPUs.
        backbone = on_device(self.target.backbone, devices.CPU if workers else world.local().device)
        protocol.check(backbone)
        # Protocols that train write checkpoints beside the results, also at a URL, so any machine can continue them.
        checkpoints = f"{self.report.folder}/{layout.PICTURES}{'/untrained' * new.untrained}"
        workspace = Workspace(folder, self.note, checkpoints, new.backbone_digest)
        if workers and (protocol.ranks or not need.extracted):
            outcome = run_on_ranks(Job(self.source.inputs, measurement, workspace.checkpoints), workers, workspace)
        else:
            if workers:
                self.note(f"{new.protocol}: the workers extract its features, and this process computes the rest")
            outcome = measurement.run(backbone, data, workspace)
        return outcome, need.digest(data)


def log_to_mlflow(report: Report, target: Target, note: Note) -> None:
    """Log the measured numbers and results.json to the MLflow run of the backbone's training, if there is one."""
    if not target.run or not report.results:
        return
    metrics = {
        f"evaluation/{r.protocol}{'_untrained' * r.untrained}/{k.partition('/')[2] or k}": v
        for r in report.results
        for k, v in r.numbers.items()
    }
    run = run_store(target.run).view
    with side_work(f"the numbers are in {report.folder}/{results.NAME}, and were not logged to MLflow", note):
        copy = run_store(report.folder).fetch() / results.NAME
        mlflow_run.update(tracking.tracking_of(run), run / layout.MLFLOW, metrics, [copy])
