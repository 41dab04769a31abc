"""Measure a backbone with a protocol, in this process or on the ranks of a process group, which are Ray workers."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

from eagleray.cluster.ray_ranks import Note, ray_ranks
from eagleray.evaluation.data import RankSource
from eagleray.evaluation.target import Inputs
from eagleray.models.backbone import Backbone
from eagleray.protocols.needs import D, Need
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.protocol import Protocol, Workspace


@dataclass(frozen=True)
class Measurement(Generic[D]):
    """A protocol, the data that it needs, and `asked`: its settings by the command, its presets and the recipe."""

    protocol: Protocol[D]
    need: Need[D]
    asked: Mapping[str, Any]

    def run(self, backbone: Backbone, data: D, workspace: Workspace) -> Outcome:
        """Run the protocol on a backbone, and return the outcome with all settings that the result records.

        Raises UserError when a setting or the data are wrong."""
        outcome = self.protocol.run(backbone, data, workspace)
        return replace(outcome, settings=self.need.settings(data, self.asked, outcome.settings))


@dataclass(frozen=True)
class Job:
    """A measurement that ranks share, as it is sent to them."""

    inputs: Inputs
    measurement: Measurement[Any]
    checkpoints: str  # folder or URL to which the protocol writes checkpoints


def run_on_ranks(job: Job, workers: int, workspace: Workspace) -> Outcome:
    """Run a protocol on `workers` ranks of a process group, or on one rank if the protocol cannot share its work. Write
    the files of rank 0 to the workspace, and return its outcome."""
    workers = workers if job.measurement.protocol.ranks else 1
    outcome, files = ray_ranks(_run_rank, job, workers=workers, gpus=job.inputs.gpus, note=workspace.note)
    for name, data in files.items():
        (workspace.out / name).write_bytes(data)
    return _moved(outcome, lambda path: workspace.out / path)


def _run_rank(job: Job, note: Note) -> tuple[Outcome, dict[str, bytes]]:
    """Run a protocol on this rank. Return the outcome, with file names for paths, and the files' contents by name."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder), note, job.checkpoints, job.inputs.digest)
        backbone, data = job.inputs.load(), job.measurement.need.open(RankSource(job.inputs, note))
        outcome = job.measurement.run(backbone, data, workspace)
        files = {path.name: path.read_bytes() for path in workspace.folder.iterdir() if path.is_file()}
    return _moved(outcome, lambda path: Path(path.name)), files


def _moved(outcome: Outcome, place: Callable[[Path], Path]) -> Outcome:
    """Return an outcome in which `place` has been applied to the path of each file."""
    return replace(outcome, pictures=tuple(map(place, outcome.pictures)), tables=tuple(map(place, outcome.tables)))
