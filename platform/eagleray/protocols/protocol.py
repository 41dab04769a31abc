"""Define evaluation protocols: classes with settings that say what data they need, and measure a backbone on the data.

The module that does a protocol's work is imported only when it runs; importing a class does not load PyTorch."""

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, PositiveInt, ValidationError
from yaml import YAMLError

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import yaml_text
from eagleray.config.yaml_text import validate_written
from eagleray.protocols.needs import Features, Images, Need
from eagleray.protocols.outcome import Outcome
from eagleray.protocols.settings import Evaluate

if TYPE_CHECKING:  # types that protocols name in quotes for their data
    from eagleray.data.index import Index  # noqa: F401
    from eagleray.models.backbone import Backbone
    from eagleray.protocols.features import FrozenFeatures  # noqa: F401

D = TypeVar("D")


@dataclass(frozen=True)
class Workspace:
    """The places to which a protocol writes its files and its progress messages."""

    folder: Path  # folder for pictures and tables, on this machine
    note: Callable[[str], None] = print
    store: str = ""  # folder or URL for the checkpoints of a training; empty: `folder`
    backbone: str = ""  # digest of the backbone, as networks of equal weights may differ in their settings

    @property
    def out(self) -> Path:
        """The folder for pictures and tables, which is created at its first use."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    @property
    def checkpoints(self) -> str:
        """The folder or URL where a protocol that trains a network keeps its checkpoints."""
        return self.store or str(self.folder)


class Protocol(BaseModel, Generic[D]):
    """Base class of evaluation protocols. A protocol's fields are its settings; `D` is the type of its data."""

    model_config = {**config.STRICT, "frozen": True}
    about: ClassVar[str] = ""  # one line for `eagleray list protocols`
    recipe: ClassVar[tuple[str, ...]] = ()  # settings that `evaluate` in a run's recipe determines, by the same names
    ranks: ClassVar[bool] = False  # whether all ranks of a process group may run it together and share its work

    @classmethod
    def of_recipe(cls, evaluate: Evaluate) -> dict[str, Any]:
        """Return the settings of this protocol that the recipe of a run determines."""
        return {name: getattr(evaluate, name) for name in cls.recipe}

    @abstractmethod
    def data(self) -> Need[D]:
        """Return the kind of data that the protocol needs."""

    def check(self, backbone: "Backbone") -> None:
        """Raise UserError if the protocol cannot evaluate the backbone with these settings. Called before `run`."""

    @abstractmethod
    def run(self, backbone: "Backbone", data: D, workspace: Workspace) -> Outcome:
        """Evaluate a backbone. If several ranks share the work, Eagleray uses only the outcome and workspace of rank 0.

        Raises UserError if a setting or the data are wrong."""


class FrozenProtocol(Protocol[D], Generic[D]):
    """A protocol that reads frozen features. These are extracted once for all protocols of a command."""

    size: PositiveInt = Evaluate.size
    resize: PositiveInt = Evaluate.resize
    features: str = "pooled"
    recipe: ClassVar[tuple[str, ...]] = ("size", "resize")

    @classmethod
    def of_recipe(cls, evaluate: Evaluate) -> dict[str, Any]:
        return super().of_recipe(evaluate) | {"features": cls.model_fields["features"].default}

    def check(self, backbone: "Backbone") -> None:
        from eagleray.protocols.features import check_kind

        check_kind(backbone, self.features, self.size)


class FeatureProtocol(FrozenProtocol["FrozenFeatures"]):
    """A protocol that reads features of labelled images. If `ranks` is true, each rank gets a share of them."""

    def data(self) -> Features:
        return Features(self.features, self.size, self.resize, shared=self.ranks)


class SizedProtocol(Protocol[D], Generic[D]):
    """A protocol that sends square images of one size through the backbone."""

    patches: ClassVar[bool] = False  # whether the protocol also reads patch tokens, not only pooled vectors
    size: PositiveInt  # side of the images, in pixels

    def check(self, backbone: "Backbone") -> None:
        from eagleray.protocols.eval_mode import check_images, check_patches

        (check_patches if self.patches else check_images)(backbone, self.size)


class ImageProtocol(SizedProtocol["Index"]):
    """A protocol that reads images without labels."""

    def data(self) -> Images:
        return Images()


class PatchProtocol(ImageProtocol):
    """A protocol that reads the patches of images without labels."""

    patches = True


@dataclass(frozen=True)
class Listed:
    """An entry of `eagleray list protocols`: a class of protocols, and presets for some of its settings."""

    kind: type[Protocol[Any]]
    about: str = ""  # one line about the protocol; empty: `kind.about`
    preset: Mapping[str, Any] = field(default_factory=dict)  # settings that replace the defaults of the class

    @property
    def default(self) -> Protocol[Any]:
        """The protocol with its default settings. Settings without a default are not set."""
        return self.kind.model_construct(**self.preset)

    @property
    def settings(self) -> list[str]:
        """The names of all settings of the protocol; those of the extraction of features are last."""
        last = FrozenProtocol.model_fields if issubclass(self.kind, FrozenProtocol) else ()
        return sorted(self.kind.model_fields, key=lambda name: name in last)

    def __str__(self) -> str:
        defaults = {name: field.default for name, field in self.kind.model_fields.items() if not field.is_required()}
        defaults |= self.preset
        of_recipe = self.kind.of_recipe(Evaluate()).keys() & {"size", "resize"}
        shown = ["of the recipe" if n in of_recipe else as_option(defaults.get(n, "required")) for n in self.settings]
        options = ", ".join(f"--{name} {value}" for name, value in zip(self.settings, shown, strict=True))
        return f"{self.about or self.kind.about}; {self.default.data().words}; {options}"

    def parse(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Convert settings to the types of their fields. Raises UserError for a value of a wrong type."""
        fields = self.kind.model_fields
        given = {name: parse_option(value, fields[name].annotation) for name, value in settings.items()}
        try:
            protocol = validate_written(self.kind.model_validate, given)
        except ValidationError as e:
            raise UserError("; ".join(f"--{line}" for line in config.explain(e, self.kind))) from None
        return {name: getattr(protocol, name) for name in settings}


def as_option(value: Any) -> str:
    """Return a value as text for the command line, from which `parse_option` reads the same value."""
    if isinstance(value, tuple):
        return ",".join(map(as_option, value)) or "''"
    return (value or "''") if isinstance(value, str) else json.dumps(value)


def parse_option(value: Any, hint: Any) -> Any:
    """Parse the text of an option as YAML, unless its type `hint` is str. For a tuple, `0.1,1` is read as a list."""
    if hint is str or not isinstance(value, str):
        return value
    try:
        parsed = yaml_text.parse_written(value)
        if "tuple" in str(hint) and not isinstance(parsed, list):
            parsed = yaml_text.parse_written(f"[{value}]")
    except (YAMLError, ValueError):
        return value
    return parsed
