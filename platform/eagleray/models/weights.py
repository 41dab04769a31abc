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

ENOUGH = 0.95  # the share of a backbone's parameters that a source must have
TIMM = "timm:"
# The keys under which a checkpoint holds its state dict, and the prefixes of a backbone's names in it. The first that
# fits best is used.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "student")  # averages first
PREFIXES = ("", "backbone.", "base_encoder.", "momentum_encoder.", "encoder_q.", "encoder.", "model.")
TABLE = "relative_position_bias_table"


class Weights(NamedTuple):
    """Tensors by name, and the number of attention heads by module where the source tells it.

    The shapes of the tensors do not show the number of heads.
    """

    source: str
    state: dict[str, Tensor]
    heads: dict[str, int]


@dataclass(frozen=True)
class Report:
    """The keys of a backbone that a source matched, resized or lacked, and the keys of the source that were not used.

    A key is followed by its shapes where they differ.
    """

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
        """Yield the summary, then a line for every key."""
        yield str(self)
        for kind in ("matched", "resized", "missing"):
            yield from (f"{kind:<10} {key}" for key in getattr(self, kind))
        yield from (f"{'left over':<10} {key}" for key in self.left)


def absolute(source: str) -> str:
    """Return a source of weights that means the same in any working folder: `timm:NAME`, a URL or an absolute path."""
    if source.startswith(TIMM) or "://" in source:
        return source
    if not Path(source).exists() and timm.is_model(source.partition(".")[0]):
        return TIMM + source
    return store.absolute(source)


def from_tensors(source: str, tensors: Mapping[str, Any]) -> Weights:
    """Return the tensors of a dictionary. If it has one of the keys in `WRAPPERS`, return the tensors under that key.

    Raises UserError when there are none.
    """
    inside = next((tensors[w] for w in WRAPPERS if isinstance(tensors.get(w), Mapping)), tensors)
    named = {_bare(str(k)): v for k, v in inside.items() if isinstance(v, Tensor)}
    if not named:
        raise UserError(f"backbone.weights={source}: holds no tensors by name")
    return Weights(source, named, {})


def from_module(source: str, model: nn.Module) -> Weights:
    """Return the weights of a model, with its numbers of attention heads."""
    return Weights(source, model.state_dict(), _heads(model))


def fill(backbone: Backbone, weights: Weights) -> Report:
    """Copy the tensors that fit into the backbone.

    Raises UserError when less than the share `ENOUGH` of the backbone's parameters fits, or when the shapes agree but
    the architecture is another one.
    """
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
    """Check that the weights belong to this architecture. Raises UserError when they do not."""
    given = f"backbone.weights={weights.source}"
    if report.share < ENOUGH:
        some = "; ".join(report.missing[:3]) + (f"; and {len(report.missing) - 3} more" if report.missing[3:] else "")
        much = f"has {report.share:.1%} of the backbone's parameters, expected {ENOUGH:.0%} or more"
        raise UserError(f"{given}: {much}; missing: {some}")
    for name, heads in _heads(model).items():
        if weights.heads.get(name, heads) != heads:
            raise UserError(
                f"{given}: {name} has {weights.heads[name]} attention heads in the weights, but {heads} in the model"
            )
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
    """Return the pretrained weights of a timm model, `timm:NAME`. Raises UserError when there are none."""
    name = source.removeprefix(TIMM)
    if not timm.models.is_model_pretrained(name):
        known = timm.list_models(pretrained=True)
        raise UserError(f"backbone.weights={TIMM}{name}: timm has no weights of this name{config.nearest(name, known)}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=True)
    except Exception as e:  # of many libraries: no network, a full disk, no such file
        why = (str(e).splitlines() or [""])[0]
        raise UserError(f"backbone.weights={TIMM}{name}: cannot be fetched ({type(e).__name__}: {why})") from None
    return from_module(source, model)


def load_tensors(path: Path) -> dict[str, Any]:
    """Read a .safetensors or PyTorch file. Raises UserError when it holds more than tensors and plain values."""
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
    """Return a parameter's name without the prefixes of DistributedDataParallel and torch.compile."""
    for wrapper in ("module.", "_orig_mod."):
        key = key.removeprefix(wrapper)
    return key


def _readings(state: dict[str, Tensor], model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the possible readings of a file: the tensors under each prefix, with their own names, then with timm's."""
    rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    for prefix in PREFIXES:
        below = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        yield below
        try:
            renamed = rename(dict(below), model) if rename and below else below
        except (AttributeError, KeyError, ValueError, RuntimeError, AssertionError):  # names that timm does not know
            continue
        yield {k: below.get(k, v) for k, v in renamed.items()}  # timm's names, but not its resizing: see _shaped


def _fitting(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> int:
    """Count the elements of the model's tensors that `state` has in the same shape; position tables may differ in
    shape."""
    return sum(t.numel() for k, t in own.items() if k in state and (state[k].shape == t.shape or _is_position(k)))


def _is_position(key: str) -> bool:
    return key.endswith(("pos_embed", TABLE))


def _shaped(model: Any, key: str, value: Tensor, own: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tensor in the model's shape, or None where it does not fit; a position table is resampled."""
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
