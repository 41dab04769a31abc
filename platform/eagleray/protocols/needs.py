"""Describe the data that protocols need: the options of `eagleray evaluate` that name them, and how they are read."""

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
    """Opens the data that a command names, in the command's own process or on a rank.

    All methods raise UserError when the data cannot be read, or are not what the protocol needs."""

    @abstractmethod
    def labelled(self) -> "ProbeSets":
        """Open the labelled images to train on and to test on."""

    @abstractmethod
    def images(self) -> "Index":
        """Open the images of --test or, without it, of --train."""

    @abstractmethod
    def folder(self, option: str) -> Path:
        """Return a local folder with the files of the folder or URL that an option names."""

    @abstractmethod
    def features(self, need: "Features") -> "FrozenFeatures":
        """Open labelled images; their features are extracted when they are first read."""

    @abstractmethod
    def suite(self, need: "Suite") -> "SuiteFeatures":
        """Open the folder of the suite's data sets."""


class Need(ABC, Generic[D]):
    """A kind of data that protocols need. `D` is the type of the object with which protocols get the data."""

    reads: tuple[str, ...] = ()  # names of the options with the data; the first is required
    words = "no data"  # these options in messages to users
    photographs = True  # whether the protocol reads or draws the images as red, green and blue
    extracted = False  # whether these are features, which Ray workers extract even if the protocol runs in one process

    def named(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the given options that name the data. Raises UserError when one is missing."""
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
    """No data."""

    photographs = False

    def open(self, source: Source) -> None:
        return None

    def digest(self, data: None) -> str:
        return ""


class Labelled(Need["ProbeSets"]):
    """Labelled images to train on, and others to test on."""

    reads = ("train", "test")
    words = "--train URL of labelled shards"
    photographs = False

    def open(self, source: Source) -> "ProbeSets":
        return source.labelled()

    def digest(self, data: "ProbeSets") -> str:
        return data.digest


class Images(Need["Index"]):
    """Images without regard to labels: those of --test or, without it, of --train."""

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
    """A folder of files that an option names."""

    def __init__(self, option: str) -> None:
        self.option, self.reads, self.words = option, (option,), f"--{option} DIR"

    def open(self, source: Source) -> Path:
        return source.folder(self.option)

    def digest(self, data: Path) -> str:
        from eagleray.protocols.digests import tree_digest

        return tree_digest(data)


@dataclass(frozen=True)
class Extraction:
    """The settings with which features are extracted."""

    kind: str  # type of features, such as pooled
    size: int  # side of the crop, in pixels
    resize: int  # short side before the crop, in pixels

    def recorded(self, bank: str) -> dict[str, Any]:
        """Return the settings of the extraction that a result records; `bank` is the number format of the features."""
        settings = {"features": self.kind, "size": self.size, "resize": self.resize, "crops": "centre"}
        return settings | ({} if bank == "fp32" else {"bank": bank})


@dataclass(frozen=True)
class Features(Extraction, Need["FrozenFeatures"]):
    """Frozen features of labelled images to train on, and of others to test on."""

    shared: bool = False  # whether each rank gets a share of the features; otherwise one process gets all, in float32
    kinds: tuple[str, ...] = ()  # types of features that are extracted in the same forward passes

    reads, words, photographs, extracted = Labelled.reads, Labelled.words, False, True

    def open(self, source: Source) -> "FrozenFeatures":
        return source.features(self)

    def digest(self, data: "FrozenFeatures") -> str:
        return data.digest

    def settings(self, data: "FrozenFeatures", asked: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
        return {**measured, **self.recorded(data.bank), "train_images": data.images[0], "test_images": data.images[1]}


@dataclass(frozen=True)
class Suite(Extraction, Need["SuiteFeatures"]):
    """Frozen features of many data sets, each in a folder of its own."""

    reads, words, extracted = ("suite",), "--suite ROOT", True

    def open(self, source: Source) -> "SuiteFeatures":
        return source.suite(self)

    def digest(self, data: "SuiteFeatures") -> str:
        return data.digest

    def settings(self, data: "SuiteFeatures", asked: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.recorded(data.bank), **measured}
