"""Run a protocol in Ray workers: on the backbone itself, or on features of which each worker has a share."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagleray.base import dist
from eagleray.base.progress import progress_over
from eagleray.cluster.ray_map import ray_map
from eagleray.cluster.ray_ranks import Note, ray_ranks
from eagleray.config.channels import Channels
from eagleray.data.index import Index, open_index
from eagleray.data.index_of_ranks import open_on_all
from eagleray.engine import world
from eagleray.evaluation.extraction import Task, own_features
from eagleray.evaluation.target import load_in_worker
from eagleray.models.backbone import Backbone
from eagleray.protocols.features import LabelledFeatures
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.probes import ProbeSets, renumber
from eagleray.protocols.registry import PROTOCOLS
from eagleray.storage.folder_copy import local_folder

if TYPE_CHECKING:
    from eagleray.protocols.video.davis import Measured


@dataclass(frozen=True)
class Job:
    """A description of a protocol's work for the processes that do it.

    It holds the name of the backbone, not its weights, which may be too large to send. The worker loads them itself."""

    backbone: str  # its name, see `load_target`
    architecture: str | None  # timm's name, for a file of tensors
    digest: str  # of the backbone
    protocol: str
    folders: tuple[str, ...]  # paths and URLs, in the order in which the protocol needs them
    arguments: Mapping[str, Any]
    gpus: bool  # each worker has a GPU
    shards: Mapping[str, str] = field(default_factory=dict)  # URLs of the images: train, test or both
    channels: Channels = ()  # as which their images are decoded
    spare: str = ""  # folder or URL of an index that could not be written beside the shards

    def load(self, note: Note = lambda _: None) -> tuple[Backbone, list[Any]]:
        """Return the backbone on this worker's device, and the data that the protocol needs: folders of this machine,
        and images of shards. A copy of a folder is noted. With shards it is called by all ranks together.

        Raises UserError when they cannot be read, or the weights are no longer those of the command."""
        backbone = load_in_worker(self.backbone, self.architecture, self.digest, self.gpus)
        train, test = (self._open(self.shards.get(name)) for name in ("train", "test"))
        folders, data = iter(self.folders), list[Any]()
        for need in PROTOCOLS[self.protocol].needs:
            if need == "images":
                data.append(test or train)
            elif need == "labelled":
                assert train
                data.append(ProbeSets.of(train, test, None))
            elif need != "patches":
                data.append(local_folder(next(folders), note))
        return backbone, data

    def _open(self, url: str | None) -> Index | None:
        """Open the index of the shards at a URL on all ranks together."""
        if not url:
            return None
        return open_on_all(lambda: open_index(url, self.spare or None, note=lambda _: None, channels=self.channels))


def measure_videos(
    job: Job, workers: int, names: Sequence[str], settings: Mapping[str, Any], out: Path
) -> Iterator["Measured"]:
    """Yield the results of the sequences of these names, each measured by one of `workers` Ray tasks."""
    tasks = [(job, name, settings) for name in names]
    results = ray_map(_measure_video, tasks, workers=workers, gpus=job.gpus)
    for measured, picture in progress_over("videos", job.protocol, results, len(tasks)):
        path = out / measured.picture.name
        path.write_bytes(picture)
        yield measured._replace(picture=path)


def _measure_video(task: tuple[Job, str, Mapping[str, Any]]) -> tuple["Measured", bytes]:
    """Measure a sequence in a Ray task; return the result and the content of its picture."""
    from eagleray.protocols.video.davis import measure_named

    job, name, settings = task
    backbone, [data] = job.load()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_named(backbone, data, name, Path(folder), **settings)
        return measured, measured.picture.read_bytes()


def run_on_ranks(
    job: Job, workers: int, *_: Any, out: Path, note: Note, checkpoints: str | None = None, **__: Any
) -> Outcome:
    """Run a protocol on the ranks of a process group, or on one worker if it is not divided, and return its outcome;
    its files are written to `out`. All other arguments of the protocol are ignored: they are in the job.

    Rank 0 keeps the checkpoints of a training in the folder or URL `checkpoints`, by default in `out`."""
    task = replace(job, arguments={**job.arguments, "checkpoints": checkpoints or str(out)})
    outcome, files = ray_ranks(_run_rank, task, workers=workers, gpus=job.gpus, note=note)
    for name, data in files.items():
        (out / name).write_bytes(data)
    return _moved(outcome, lambda path: out / path)


def _run_rank(job: Job, note: Note) -> tuple[Outcome, dict[str, bytes]]:
    """Run a protocol as one of several ranks; return its outcome, with names of pictures, and its files."""
    (backbone, data), protocol = job.load(note), PROTOCOLS[job.protocol]
    with tempfile.TemporaryDirectory() as folder:
        arguments = {**job.arguments, "out": Path(folder), "note": note}
        arguments = {name: value for name, value in arguments.items() if name in protocol.parameters}
        outcome = outcome_of(protocol.run(backbone, *data, **arguments))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    return _moved(outcome, lambda path: Path(path.name)), files


def _moved(outcome: Outcome, place: Callable[[Path], Path]) -> Outcome:
    """Return an outcome whose files are in another place."""
    return replace(outcome, pictures=tuple(map(place, outcome.pictures)), tables=tuple(map(place, outcome.tables)))


def outcome_of(result: Any) -> Outcome:
    """Return the outcome of a protocol, which may return its numbers alone."""
    return result if isinstance(result, Outcome) else Outcome(result)


@dataclass(frozen=True)
class FeatureJob:
    """A description of a protocol's work on frozen features for ranks that share them."""

    protocol: str
    kind: str  # of its features
    train: Task  # with all kinds of features that are extracted together
    test: Task
    arguments: Mapping[str, Any]


Images = tuple[int, int]  # of the training and the test set that decode, on all ranks


def run_on_shares(job: FeatureJob, workers: int, note: Note) -> tuple[Outcome, Images]:
    """Run a protocol on the ranks of a process group, each of which extracts and keeps the features of its share of the
    images."""
    return ray_ranks(_run_share, job, workers=workers, gpus=job.train.gpus, note=note)


def _run_share(job: FeatureJob, note: Note) -> tuple[Outcome, Images]:
    """Run a protocol as one of several ranks."""
    train, test = (own_features(task, note)[job.kind] for task in (job.train, job.test))
    return run_on_own(job.protocol, train, test, world.device_of(job.train.gpus), job.arguments, note)


def run_on_own(
    protocol: str,
    train: LabelledFeatures,
    test: LabelledFeatures,
    device: torch.device,
    arguments: Mapping[str, Any],
    note: Note,
) -> tuple[Outcome, Images]:
    """Run a protocol on the features that this rank has, and return its outcome. It is empty if one of the sets has no
    image. A protocol that takes no shares gets float32. Called by all ranks together."""
    training, testing = map(sum, zip(*dist.gather_objects((len(train.y), len(test.y))), strict=True))
    known = PROTOCOLS[protocol]
    more = {"note": note} if "note" in known.parameters else {}
    if not training or not testing:
        return Outcome({}), (training, testing)
    if not known.ranks:
        train, test = (features._replace(x=features.x.float()) for features in (train, test))
    return known.run(*renumber(train, test, device), **arguments, **more), (training, testing)
