"""Pretrained weights are read from timm or a file of tensors and matched with a backbone, key by key."""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.models.backbone import Backbone
from eagleray.storage import store

ENOUGH = 0.95  # of a backbone's parameters have to be found
TIMM = "timm:"
# Where the tensors are in a dictionary of others, and before the names of a backbone's own; the first that fits best.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "student")  # averages first
PREFIXES = ("", "backbone.", "base_encoder.", "momentum_encoder.", "encoder_q.", "encoder.", "model.")
TABLE = "relative_position_bias_table"


class Weights(NamedTuple):
    """Tensors by name, and how many attention heads each module has where the source says so: shapes do not."""

    source: str
    state: dict[str, Tensor]
    heads: dict[str, int]


@dataclass(frozen=True)
class Report:
    """Keys of the backbone that were found, resized or missing, each with its shapes where they differ, and keys of
    the source that nobody wanted."""

    source: str
    matched: Sequence[str]
    resized: Sequence[str]
    missing: Sequence[str]
    left: Sequence[str]
    share: float  # of the backbone's parameters, by number of elements

    def __str__(self) -> str:
        counts = f"{len(self.matched)} tensors matched, {len(self.resized)} resized, {len(self.missing)} missing"
        return f"{self.source}: {counts}, {len(self.left)} left over; {self.share:.1%} of the backbone's parameters"

    def lines(self) -> Iterator[str]:
        """The same, then every key."""
        yield str(self)
        for kind in ("matched", "resized", "missing"):
            yield from (f"{kind:<10} {key}" for key in getattr(self, kind))
        yield from (f"{'left over':<10} {key}" for key in self.left)


def absolute(source: str) -> str:
    """A source that means the same in any folder: timm's begin with `timm:`, other names are places."""
    if source.startswith(TIMM) or "://" in source:
        return source
    if not Path(source).exists() and timm.is_model(source.partition(".")[0]):
        return TIMM + source
    return store.absolute(source)


def from_tensors(source: str, tensors: Mapping[str, Any]) -> Weights:
    """The tensors of a dictionary, or of the first dictionary inside it that usually holds them. Raises UserError."""
    inside = next((tensors[w] for w in WRAPPERS if isinstance(tensors.get(w), Mapping)), tensors)
    named = {_bare(str(k)): v for k, v in inside.items() if isinstance(v, Tensor)}
    if not named:
        raise UserError(f"backbone.weights={source}: holds no tensors by name")
    return Weights(source, named, {})


def from_module(source: str, model: nn.Module) -> Weights:
    """The weights of a model, with its numbers of attention heads."""
    return Weights(source, model.state_dict(), _heads(model))


def fill(backbone: Backbone, weights: Weights) -> Report:
    """Copy what fits into the backbone. Raises UserError when too little does, or when the same shapes mean another
    architecture."""
    model = backbone.model
    own: dict[str, Tensor] = model.state_dict()
    state = max(_readings(weights.state, model), key=lambda s: _fitting(s, own))
    fitted = {k: v for k, v in ((k, _shaped(model, k, v, own)) for k, v in state.items()) if v is not None}
    resized = [k for k in fitted if fitted[k].shape != state[k].shape]
    used = {id(state[k]) for k in fitted}
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    report = Report(
        weights.source,
        matched=[k for k in fitted if k not in resized],
        resized=[f"{k} {_size(fitted[k])} of {_size(state[k])}" for k in resized],
        missing=[k + (f" {_size(own[k])}, is {_size(state[k])}" if k in state else "") for k in own if k not in fitted],
        left=[k for k, v in weights.state.items() if id(v) not in used],
        share=sum(n for name, n in parameters.items() if name in fitted) / sum(parameters.values()),
    )
    _check(model, weights, report, fitted, state)
    model.load_state_dict(fitted, strict=False)
    return report


def _check(
    model: nn.Module, weights: Weights, report: Report, fitted: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Raises UserError for a checkpoint of another architecture."""
    given = f"backbone.weights={weights.source}"
    if report.share < ENOUGH:
        some = "; ".join(report.missing[:3]) + (f"; and {len(report.missing) - 3} more" if report.missing[3:] else "")
        much = f"has {report.share:.1%} of the backbone's parameters, expected {ENOUGH:.0%} or more"
        raise UserError(f"{given}: {much}; missing: {some}")
    for name, heads in _heads(model).items():
        if weights.heads.get(name, heads) != heads:
            raise UserError(f"{given}: {name} has {weights.heads[name]} attention heads there, and {heads} here")
    own = model.state_dict()
    for key in (k for k in {*own, *state} - {*fitted} if k.endswith(".running_mean")):
        layer = key.removesuffix(".running_mean")
        if key in own:
            raise UserError(f"{given}: {layer} is batch norm in the model, and the file has none")
        if any(f"{above}.weight" in own for above in itertools.accumulate(layer.split("."), "{}.{}".format)):
            raise UserError(f"{given}: {layer} is batch norm in the file, and the model has none")


def _heads(model: nn.Module) -> dict[str, int]:
    return {n: m.num_heads for n, m in model.named_modules() if isinstance(getattr(m, "num_heads", None), int)}


def from_timm(source: str) -> Weights:
    """The pretrained weights of a timm model, `timm:NAME`. Raises UserError."""
    name = source.removeprefix(TIMM)
    if not timm.models.is_model_pretrained(name):
        known = timm.list_models(pretrained=True)
        raise UserError(f"backbone.weights={TIMM}{name}: timm has no weights of this name{config.nearest(name, known)}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=True)
    except Exception as e:  # of many libraries: no network, no space, no such file
        why = (str(e).splitlines() or [""])[0]
        raise UserError(f"backbone.weights={TIMM}{name}: cannot be fetched ({type(e).__name__}: {why})") from None
    return from_module(source, model)


def load_tensors(path: Path) -> dict[str, Any]:
    """Read a .safetensors or PyTorch file; a pickle may hold tensors and plain values only. Raises UserError."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the options that many scripts store
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError) as e:
        raise UserError(f"backbone.weights={path}: cannot be read ({type(e).__name__})") from None
    except Exception as e:  # pickle's, where the file wants to run code
        why = str(e).split(". ")[0].splitlines()[0]
        raise UserError(
            f"backbone.weights={path}: holds more than tensors; store its state dict alone ({why})"
        ) from None
    if not isinstance(state, Mapping):
        raise UserError(f"backbone.weights={path}: expected tensors by name, found a {type(state).__name__}")
    return dict(state)


def _bare(key: str) -> str:
    """Without what wrappers of a model leave before its names."""
    for wrapper in ("module.", "_orig_mod."):
        key = key.removeprefix(wrapper)
    return key


def _readings(state: dict[str, Tensor], model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The tensors below each prefix by their own names, and by those that timm gives to the names of the authors."""
    rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    for prefix in PREFIXES:
        below = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        yield below
        try:
            renamed = rename(dict(below), model) if rename and below else below
        except (AttributeError, KeyError, ValueError, RuntimeError, AssertionError):  # names that it cannot know
            continue
        yield {k: below.get(k, v) for k, v in renamed.items()}  # as it was: what is resized is decided here


def _fitting(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> int:
    """Elements of the model whose names are there, in whatever shape their position tables are."""
    return sum(t.numel() for k, t in own.items() if k in state and (state[k].shape == t.shape or _is_position(k)))


def _is_position(key: str) -> bool:
    return key.endswith(("pos_embed", TABLE))


def _shaped(model: Any, key: str, value: Tensor, own: Mapping[str, Tensor]) -> Tensor | None:
    """The tensor as the model has it: a position table for its grid or window; None where it does not fit."""
    if key not in own or value.shape == own[key].shape:
        return value if key in own else None
    want = own[key].shape
    if not _is_position(key) or value.ndim != len(want) or value.shape[-1] != want[-1]:
        return None
    if key.endswith(TABLE):
        window = model.get_submodule(key.rpartition(".")[0]).window_size
        return resize_rel_pos_bias_table(value, new_window_size=window, new_bias_shape=tuple(want))
    grid = list(model.patch_embed.grid_size)
    prefix = want[1] - math.prod(grid)
    if math.isqrt(value.shape[1] - prefix) ** 2 != value.shape[1] - prefix:
        return None
    return resample_abs_pos_embed(value, new_size=grid, num_prefix_tokens=prefix)


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
