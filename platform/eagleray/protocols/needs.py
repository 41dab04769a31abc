"""Describe the data that protocols need: the options of `eagleray evaluate` that name them, and how they are opened."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from eagleray.base.errors import UserError

if TYPE_CHECKING:
    from eagleray.data.index import Index
    from eagleray.protocols.features import FrozenFeatures, SuiteFeatures
    from eagleray.protocols.probes import ProbeSets

D = TypeVar("D")


class Source(ABC):
    """Opens the data that the options of a command name, in the command's own process or on a rank.

    All methods raise UserError when the data cannot be read, or are not what the protocol needs."""

    @abstractmethod
    def labelled(self) -> "ProbeSets":
        """Open the labelled images of --train and those of --test."""

    @abstractmethod
    def images(self) -> "Index":
        """Open the images of --test or, without it, of --train."""

    @abstractmethod
    def folder(self, option: str) -> Path:
        """Return a local folder with the files of the folder or URL that this option names."""

    @abstractmethod
    def features(self, need: "Features") -> "FrozenFeatures":
        """Open labelled images. Their features are extracted when they are first read."""

    @abstractmethod
    def suite(self, need: "Suite") -> "SuiteFeatures":
        """Open the folder --suite, in which each data set of the suite has a folder."""


class Need(ABC, Generic[D]):
    """A kind of data that protocols need. `D` is the type of the object through which a protocol reads them."""

    reads: tuple[str, ...] = ()  # options that name the data; the first is required
    words = "no data"  # how messages to users name these options
    photographs = True  # whether the protocol reads or draws the images as red, green and blue
    extracted = False  # whether the data are features, which Ray workers extract even for a protocol in one process

    def named(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return those of the options `given` that name the data. Raises UserError when the required one is missing."""
        if any(option not in given for option in self.reads[:1]):
            raise UserError(f"needs {self.words}")
        return {option: given[option] for option in self.reads if option in given}

    @abstractmethod
    def open(self, source: Source) -> D:
        """Open the data. Raises UserError when they cannot be read, or are not what the protocol needs."""

    @abstractmethod
    def digest(self, data: D) -> str:
        """Return the digest of the data."""

    def settings(self, data: D, asked: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a result records: those `asked` for, overridden by those `measured` in the run."""
        return {**asked, **measured}


class Nothing(Need[None]):
    """The need of a protocol that reads no data."""

    photographs = False

    def open(self, source: Source) -> None:
        return None

    def digest(self, data: None) -> str:
        return ""


class Labelled(Need["ProbeSets"]):
    """Labelled images: a set to train on and a set to test on."""

    reads = ("train", "test")
    words = "--train URL of labelled shards"
    photographs = False

    def open(self, source: Source) -> "ProbeSets":
        return source.labelled()

    def digest(self, data: "ProbeSets") -> str:
        return data.digest


class Images(Need["Index"]):
    """Images whose labels are not needed: those of --test or, without it, of --train."""

    words = "--train or --test URL"

    def named(self, given: Mapping[str, str]) -> dict[str, str]:
        for option in "test", "train":
            if option in given:
                return {option: given[option]}
        raise UserError(f"needs {self.words}")

    def open(self, source: Source) -> "Index":
        return source.images()

    def digest(self, data: "Index") -> str:
        import numpy as np

        from eagleray.data.digests import data_digest

        return data_digest(data, np.arange(len(data)))


class Folder(Need[Path]):
    """A local folder of files, which an option names by path or URL."""

    def __init__(self, option: str) -> None:
        self.option, self.reads, self.words = option, (option,), f"--{option} DIR"

    def open(self, source: Source) -> Path:
        return source.folder(self.option)

    def digest(self, data: Path) -> str:
        from eagleray.protocols.digests import tree_digest

        return tree_digest(data)


@dataclass(frozen=True)
class Extraction:
    """The settings with which features are extracted from centre crops."""

    kind: str  # type of features, such as pooled
    size: int  # side of the crop, in pixels
    resize: int  # short side of the image before the crop, in pixels

    def recorded(self, bank: str) -> dict[str, Any]:
        """Return the settings that a result records about its features. `bank` is the number format of the features."""
        settings = {"features": self.kind, "size": self.size, "resize": self.resize, "crops": "centre"}
        return settings | ({} if bank == "fp32" else {"bank": bank})

    def completed(self, found: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that the run has `found`, and behind them those that were only `asked` for."""
        return found | {name: value for name, value in asked.items() if name not in found}


@dataclass(frozen=True)
class Features(Extraction, Need["FrozenFeatures"]):
    """Frozen features of labelled images: of a set to train on and a set to test on."""

    shared: bool = False  # whether each rank gets a share of the features; otherwise one process gets all, in float32
    kinds: tuple[str, ...] = ()  # all types to extract in the same forward passes, also for other protocols

    reads, words, photographs, extracted = Labelled.reads, Labelled.words, False, True

    def open(self, source: Source) -> "FrozenFeatures":
        return source.features(self)

    def digest(self, data: "FrozenFeatures") -> str:
        return data.digest

    def settings(self, data: "FrozenFeatures", asked: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
        images = {"train_images": data.images[0], "test_images": data.images[1]}
        return self.completed({**measured, **self.recorded(data.bank), **images}, asked)


@dataclass(frozen=True)
class Suite(Extraction, Need["SuiteFeatures"]):
    """Frozen features of the data sets of a suite. Each data set has a folder of its own."""

    reads, words, extracted = ("suite",), "--suite ROOT", True

    def open(self, source: Source) -> "SuiteFeatures":
        return source.suite(self)

    def digest(self, data: "SuiteFeatures") -> str:
        return data.digest

    def settings(self, data: "SuiteFeatures", asked: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
        # The reference changes no score, so results with and without it stay comparable.
        asked = {name: value for name, value in asked.items() if name != "reference"}
        return self.completed({**self.recorded(data.bank), **measured}, asked)
