"""Describe an evaluation protocol: the function that computes its numbers, the data that it needs and its settings."""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import PositiveInt, PydanticUserError, TypeAdapter, ValidationError, create_model
from yaml import YAMLError

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.config import signature, yaml_text
from eagleray.config.written import validated
from eagleray.protocols.outcome import Outcome

# The data that a protocol may need, and the options of `eagleray evaluate` that name it.
DATA_OPTIONS = {
    "labels": "--train URL of labelled shards",
    "labelled": "--train URL of labelled shards",
    "images": "--train or --test URL",
    "coco": "--coco DIR",
    "masks": "--masks DIR",
    "davis": "--davis DIR",
    "frames": "--frames DIR",
    "suite": "--suite ROOT",
}
# Of them, those that are read or drawn as photographs.
RGB_ONLY = ("images", "suite", "coco", "masks", "davis", "frames")
PASSED = ("out", "note", "model", "checkpoints", "elsewhere")  # arguments that are no settings
# Settings of every protocol on frozen features; they belong to the extraction, which protocols share.
EXTRACTION: dict[str, Any] = {"size": PositiveInt, "resize": PositiveInt, "features": str}


@dataclass(frozen=True)
class Protocol:
    """An evaluation protocol: a function that returns an Outcome, and the data and settings that it is called with.

    The positional arguments of the function depend on `needs`:

    * With "labels", they are the features of a training set and those of a test set.
    * With "suite", they are a function that returns the features of the shards at a URL, and the URL of the suite's
      folder.
    * Otherwise, they are the backbone, then what the protocol needs: with "labelled" the labelled images as ProbeSets,
      with "images" the images as an Index, else a folder.

    Its keyword-only arguments are the settings of the protocol, except for those of PASSED: `out`, a folder for
    pictures; `note`, a function that is called with lines about the progress; `model`, of "suite", the timm name of the
    backbone; `checkpoints`, the folder or URL for checkpoints of a training; and `elsewhere`, a function that measures
    parts of the data in other processes."""

    about: str  # one line for `eagleray list protocols`
    function: str  # module:function, which is imported when the protocol runs
    needs: tuple[str, ...] = ()  # of DATA_OPTIONS, and "patches": a backbone with patch tokens
    features: str = "pooled"  # the default type of frozen features
    preset: Mapping[str, Any] = field(default_factory=dict)  # settings that replace the function's defaults
    ranks: bool = False  # whether the function may be called by all ranks of a process group, which share its work

    @property
    def run(self) -> Callable[..., Outcome]:
        """The function that computes the protocol's numbers, imported on first use."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]

    @property
    def frozen(self) -> bool:
        """Return whether the protocol works on frozen features, which are extracted once for all such protocols."""
        return not {"labels", "suite"}.isdisjoint(self.needs)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of the function by name."""
        return dict(inspect.signature(self.run).parameters)

    @property
    def keywords(self) -> signature.Fields:
        """The types and defaults of the settings that the function takes, read without importing the function."""
        module, _, name = self.function.partition(":")
        own = signature.fields(module, name, skip=PASSED)
        return {name: field for name, field in own.items() if is_text(field[0])}

    @property
    def settings(self) -> list[str]:
        """The names of all settings of the protocol, including those of the feature extraction."""
        own = list(self.keywords)
        return own + [name for name in EXTRACTION if self.frozen and name not in own]

    def __str__(self) -> str:
        defaults = {"size": "of the recipe", "resize": "of the recipe", "features": self.features}
        own = {name: default for name, (_, default) in self.keywords.items()} | dict(self.preset)
        defaults |= {n: v for n, v in own.items() if v is not ...}
        needs = "; ".join(DATA_OPTIONS[n] for n in self.needs if n in DATA_OPTIONS) or "no data"
        return f"{self.about}; {needs}; " + ", ".join(f"--{n} {as_option(defaults[n])}" for n in self.settings)

    def parse(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Convert settings to the types that the function's signature declares.

        Raises UserError for a value that does not have the declared type."""
        hints = {name: hint for name, (hint, _) in self.keywords.items()} | EXTRACTION
        model = create_model("settings", __config__=config.STRICT, **{k: (hints[k], ...) for k in settings})  # type: ignore[call-overload]
        try:
            typed = validated(model.model_validate, {k: parse_option(v, hints[k]) for k, v in settings.items()})
        except ValidationError as e:
            raise UserError("; ".join(f"--{line}" for line in config.explain(e, model))) from None
        return {k: getattr(typed, k) for k in settings}


def is_text(hint: Any) -> bool:
    """Return whether a value of this type can be written on the command line, which is not the case for a function or a
    tensor."""
    try:
        TypeAdapter(hint).json_schema()
    except PydanticUserError:
        return False
    return True


def as_option(value: Any) -> str:
    """Return a value as it is typed on the command line, so that `parse_option` gives it back."""
    if isinstance(value, tuple):
        return ",".join(map(as_option, value)) or "''"
    return (value or "''") if isinstance(value, str) else json.dumps(value)


def parse_option(value: Any, hint: Any) -> Any:
    """Parse the value of an option as YAML; if the type is a tuple, `0.1,1` is read as a list."""
    if hint is str or not isinstance(value, str):
        return value
    try:
        parsed = yaml_text.parse_written(value)
        if "tuple" in str(hint) and not isinstance(parsed, list):
            parsed = yaml_text.parse_written(f"[{value}]")
    except (YAMLError, ValueError):
        return value
    return parsed
