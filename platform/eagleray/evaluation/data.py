"""Open the data of an `eagleray evaluate` command for its protocols, in the command's own process or on each rank."""

from functools import cache, partial
from pathlib import Path

import torch

from eagleray.base import dist
from eagleray.base.errors import UserError
from eagleray.data.digests import data_digest
from eagleray.data.index import Index, Note, open_index, open_shown
from eagleray.data.index_of_ranks import open_on_all
from eagleray.data.labels import unread_labels
from eagleray.engine import world
from eagleray.evaluation.extraction import Task, features, own_features
from eagleray.evaluation.target import Inputs, Target
from eagleray.protocols.features import Extracted, FrozenFeatures, LabelledFeatures, SuiteFeatures, labelled_samples
from eagleray.protocols.needs import Features, Source, Suite
from eagleray.protocols.probes import ProbeSets, renumber
from eagleray.storage.folder_copy import local_folder

ROWS = 4096  # images whose features are checked at a time, which limits the memory of the check


class RankSource(Source):
    """Opens the data of an `eagleray evaluate` command on a rank. All ranks open data together."""

    def __init__(self, inputs: Inputs, note: Note = lambda _: None) -> None:
        self.inputs, self.note = inputs, note
        self.places = inputs.urls  # URLs whose shards are opened, by option (train, test)

    @property
    def device(self) -> torch.device:
        """The device on which protocols compute with the features."""
        return world.device_of(self.inputs.gpus)

    def open(self, url: str) -> Index:
        """Open the index of the shards at a URL."""
        spare, channels = self.inputs.spare or None, self.inputs.channels
        return open_on_all(lambda: open_index(url, spare, note=lambda _: None, channels=channels))

    def read(self, index: Index, task: Task) -> dict[str, LabelledFeatures]:
        """Return the features of this rank's share of the task's images, by type."""
        return own_features(index, task, self.note)

    def vectors(self, index: Index, task: Task) -> LabelledFeatures:
        """Return the features of the task's type of this rank's share of its images. Raises UserError, on all ranks
        alike, when some are not finite numbers, as these would decide what a protocol says of all other images."""
        found = self.read(index, task)[task.how.kind]
        bad = sum(int((~part.isfinite().all(1)).sum()) for part in found.x.split(ROWS))
        bad, images = map(sum, zip(*dist.gather_objects((bad, len(found.y))), strict=True))
        if bad:
            raise UserError(
                f"{task.url}: the features of {bad} of {images} images are not finite numbers; the weights are "
                "damaged, or they overflow the number format in which the device computes"
            )
        return found

    def labelled(self) -> ProbeSets:
        tested = self.open(self.places["test"]) if "test" in self.places else None
        sets = ProbeSets.of(self.open(self.places["train"]), tested, None)
        if sets is None:
            url = self.inputs.given["train"]
            raise UserError(f"--train {url}: these shards have no labels, and this protocol needs them")
        sets.check()
        for unread in filter(None, map(unread_labels, {id(i): i for i in (sets.train, sets.test)}.values())):
            self.note(f"{unread}, and are left out")
        return sets

    def images(self) -> Index:
        return self.open(self.places.get("test") or self.places["train"])

    def folder(self, option: str) -> Path:
        return local_folder(self.inputs.urls[option], self.note)

    def features(self, need: Features) -> FrozenFeatures:
        sets = self.labelled()
        return FrozenFeatures(partial(self.extract, need, sets), sets.digest, self.inputs.bank)

    def extract(self, need: Features, sets: ProbeSets) -> Extracted:
        """Return the features of both sets, to train and to test on. Raises UserError when no image of one set
        decodes."""
        urls, given = self.inputs.urls, self.inputs.given
        each = (urls["train"], sets.train, sets.train_samples), (urls.get("test"), sets.test, sets.test_samples)
        train, test = (
            self.vectors(index, Task(self.inputs, url or urls["train"], samples, need, need.kinds or (need.kind,)))
            for url, index, samples in each
        )
        trained, tested = map(sum, zip(*dist.gather_objects((len(train.y), len(test.y))), strict=True))
        if not trained or not tested:
            option = "test" if trained and "test" in given else "train"
            raise UserError(f"--{option} {given[option]}: none of the labelled images in these shards decodes")
        if not need.shared:
            train, test = (features._replace(x=features.x.float()) for features in (train, test))
        return Extracted(*renumber(train, test, self.device), (trained, tested))

    def suite(self, need: Suite) -> SuiteFeatures:
        digests: list[str] = []

        def read(url: str) -> LabelledFeatures:
            index = self.open(url)
            samples = labelled_samples(index)
            digests.append(data_digest(index, samples))
            return self.vectors(index, Task(self.inputs, url, samples, need, (need.kind,)))

        return SuiteFeatures(self.inputs.given["suite"], read, self.inputs.model, digests, self.inputs.bank)


class CommandSource(RankSource):
    """Opens the data of an `eagleray evaluate` command in its own process: each data set once, for all protocols."""

    def __init__(self, inputs: Inputs, target: Target, workers: int, note: Note) -> None:
        """The features are extracted by `workers` Ray tasks, or by this process if `workers` is 0."""
        super().__init__(inputs, note)
        self.places, self.target, self.workers = inputs.given, target, workers
        self.labelled, self.images = cache(super().labelled), cache(super().images)  # type: ignore[method-assign]
        self.copies: dict[str, Path] = {}  # local copy of each folder that was opened, by URL

    @property
    def device(self) -> torch.device:
        return world.local().device

    def open(self, url: str) -> Index:
        return open_shown(url, self.inputs.spare, note=self.note, channels=self.inputs.channels)

    def read(self, index: Index, task: Task) -> dict[str, LabelledFeatures]:
        return features(self.target, index, task, workers=self.workers, note=self.note)

    def folder(self, option: str) -> Path:
        url = self.inputs.urls[option]
        if url not in self.copies:
            self.copies[url] = super().folder(option)
        return self.copies[url]
