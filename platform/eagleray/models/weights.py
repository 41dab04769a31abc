"""Pretrained weights are read from timm or a file of tensors and matched with a backbone, key by key."""

import argparse
import itertools
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError
from eagleray.models import hub, pixels, transformers_names
from eagleray.models.backbone import Backbone
from eagleray.models.network import HF, TIMM
from eagleray.models.pixels import OURS, Pixels
from eagleray.models.resample import has_any_size, shaped, without_class_position

ENOUGH = 0.95  # the share of a backbone's parameters that a source must have
KEY = "backbone.weights"  # of a recipe, which errors name
# The keys under which a checkpoint holds its state dict: the first that holds tensors is used. And the prefixes of a
# backbone's names in it: the first that fits best is used.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "student")  # averages first
PREFIXES = ("", "backbone.", "base_encoder.", "momentum_encoder.", "encoder_q.", "encoder.", "model.")
# The classes of options that training scripts store beside their tensors; yacs need not be installed to skip its own.
OPTIONS: list[Any] = [argparse.Namespace, (OrderedDict, "yacs.config.CfgNode")]
# Files beside the weights on the Hub, of transformers and of timm, and their keys for mean and deviation of the pixels.
CONFIGS = {"preprocessor_config.json": ("image_mean", "image_std"), "config.json": ("mean", "std")}
REGISTERS = ("reg_token", "register_tokens")
BUFFERS = {"relative_position_index", "attn_mask"}  # that timm no longer stores
# What a backbone may lack, and the option with which it has it.
ADDED = {".ls1.gamma": "backbone.options.init_values=1e-5"} | dict.fromkeys(REGISTERS, "backbone.options.reg_tokens=N")
CHUNK = re.compile(r"blocks\.\d+\.(\d+\.)")  # DINOv2 numbers groups of blocks, and the blocks of all groups


class Weights(NamedTuple):
    """Tensors by name, and the number of attention heads by module where the source tells it.

    The shapes of the tensors do not show the number of heads.
    """

    source: str
    state: dict[str, Tensor]
    heads: dict[str, int]
    key: str = KEY  # of the recipe, which named the source; empty without a recipe
    pixels: Pixels | None = OURS  # with which they were trained; None: the source should say it and does not

    @property
    def given(self) -> str:
        """The source as a recipe names it, behind its key; by itself where no recipe names it."""
        return f"{self.key}={self.source}" if self.key else self.source

    def unconverted(self) -> "Weights":
        """Return the same for a backbone whose images are converted before it gets them."""
        return self if self.pixels is None else self._replace(pixels=OURS)


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
    warning: str = ""  # about the colours that the weights were trained with

    def __str__(self) -> str:
        counts = f"{len(self.matched)} tensors matched, {len(self.resized)} resized, {len(self.missing)} missing"
        return f"{self.source}: {counts}, {len(self.left)} left over; {self.share:.1%} of the backbone's parameters"

    def lines(self) -> Iterator[str]:
        """Yield the summary and the warning, then a line for every key."""
        yield str(self)
        yield from [f"warning: {self.warning}"] * bool(self.warning)
        for kind in ("matched", "resized", "missing"):
            yield from (f"{kind:<10} {key}" for key in getattr(self, kind))
        yield from (f"{'left over':<10} {key}" for key in self.left)


def from_tensors(source: str, tensors: Mapping[str, Any], key: str = KEY) -> Weights:
    """Return the tensors of a dictionary, or those under the first of the keys in `WRAPPERS` that holds any.

    Raises UserError when there are none.
    """
    wrapped = (tensors_in(tensors[w]) for w in WRAPPERS if isinstance(tensors.get(w), Mapping))
    named = transformers_names.to_timm(next(filter(None, wrapped), {}) or tensors_in(tensors))
    if not named:
        raise UserError(f"{key}={source}: holds no tensors by name")
    return Weights(source, named, {}, key)


def tensors_in(mapping: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of a dictionary, by names without what wrappers such as DistributedDataParallel put in."""
    return {_bare(str(k)): v for k, v in mapping.items() if isinstance(v, Tensor)}


def from_module(source: str, model: nn.Module, key: str = KEY) -> Weights:
    """Return the weights of a model, with its numbers of attention heads."""
    return Weights(source, model.state_dict(), _heads(model), key)


def fill(backbone: Backbone, weights: Weights, *, whole: bool = False) -> Report:
    """Copy the tensors that fit into the backbone, which then takes pixels with our mean and deviation.

    Raises UserError when less than the share `ENOUGH` of the backbone's parameters fits, or when the shapes agree but
    the architecture is another one. With `whole` also when the weights have layers inside of the backbone that it
    lacks, without which their features are others.
    """
    model = backbone.model
    own: dict[str, Tensor] = model.state_dict()
    state = max(_readings(weights.state, model), key=lambda s: _fitting(s, own))
    moved = without_class_position(model, state, own)
    fitted = {k: v for k, v in ((k, shaped(model, k, v, own)) for k, v in moved.items()) if v is not None}
    resized = [k for k in fitted if fitted[k].shape != state[k].shape]
    used = {id(state[k]) for k in fitted}
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    report = Report(
        weights.source,
        matched=[k for k in fitted if k not in resized],
        resized=[f"{k} {size(fitted[k])} of {size(state[k])}" for k in resized],
        missing=[k + (f" {size(own[k])}, is {size(state[k])}" if k in state else "") for k in own if k not in fitted],
        left=[k for k, v in weights.state.items() if id(v) not in used],
        share=sum(n for name, n in parameters.items() if name in fitted) / sum(parameters.values()),
        warning=_convert(model, weights, fitted),
    )
    _check(model, weights, report, fitted, state)
    if whole:
        _check_whole(model, weights, state)
    model.load_state_dict(fitted, strict=False)
    return report


def _convert(model: nn.Module, weights: Weights, fitted: dict[str, Tensor]) -> str:
    """Convert tensors to our colours. Return a warning where that cannot be done."""
    if weights.pixels is None:
        return f"{weights.given}: its repository says no mean and deviation of pixels; it gets ours, {OURS}"
    if pixels.convert(model, fitted, weights.pixels):
        return ""
    return (
        f"{weights.given}: was trained with pixels of {weights.pixels}, and gets ours, {OURS}: the first layer of "
        f"{type(model).__name__} cannot convert them exactly"
    )


def _check(
    model: nn.Module, weights: Weights, report: Report, fitted: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Check that the weights belong to this architecture. Raises UserError when they do not."""
    given = weights.given
    if report.share < ENOUGH:
        some = "; ".join(report.missing[:3]) + (f"; and {len(report.missing) - 3} more" if report.missing[3:] else "")
        much = f"has {report.share:.1%} of the backbone's parameters, expected {ENOUGH:.0%} or more"
        raise UserError(f"{given}: {much}; missing: {some}")
    for name, heads in _heads(model).items():
        if weights.heads.get(name, heads) != heads:
            there = weights.heads[name]
            hint = "" if weights.key == KEY else f"; backbone.options.num_heads={there} is the same network"
            raise UserError(
                f"{given}: {name} has {there} attention heads in the weights, but {heads} in the model{hint}"
            )
    own = model.state_dict()
    for key in (k for k in {*own, *state} - {*fitted} if k.endswith(".running_mean")):
        layer = key.removesuffix(".running_mean")
        if key in own:
            raise UserError(f"{given}: {layer} is batch norm in the model, and the file has none")
        if any(f"{above}.weight" in own for above in itertools.accumulate(layer.split("."), "{}.{}".format)):
            raise UserError(f"{given}: {layer} is batch norm in the file, and the model has none")


def _check_whole(model: nn.Module, weights: Weights, state: Mapping[str, Tensor]) -> None:
    """Check that the weights have no layers inside of the backbone that it lacks. Raises UserError."""
    own, buffers = model.state_dict(), {name.rpartition(".")[2] for name, _ in model.named_buffers()} | BUFFERS
    inside = {name for name, part in model.named_children() if next(part.parameters(), None) is not None}
    inside -= _classifiers(model)  # such as ConvNeXt's, whose norm is the backbone's
    extra = [k for k in state if k not in own and k.rpartition(".")[2] not in buffers]
    extra = [k for k in extra if k.partition(".")[0] in inside or k in REGISTERS]
    if not extra:
        return
    hint = next((f"; {option} adds them" for part, option in ADDED.items() if part in extra[0]), "")
    hint = hint.replace("N", str(state[extra[0]].shape[-2]) if extra[0] in REGISTERS else "")
    more = f" and {len(extra) - 1} more tensors" if extra[1:] else ""
    raise UserError(
        f"{weights.given}: has {extra[0]}{more} inside of the backbone, which {type(model).__name__} "
        f"lacks here; another architecture{hint}"
    )


def _classifiers(model: nn.Module) -> set[str]:
    """Return the names of the top modules that hold the classifiers of a timm model, which a backbone is without."""
    named = getattr(model, "default_cfg", {}).get("classifier") or ()
    return {name.partition(".")[0] for name in ([named] if isinstance(named, str) else named)}


def _heads(model: nn.Module) -> dict[str, int]:
    return {n: m.num_heads for n, m in model.named_modules() if isinstance(getattr(m, "num_heads", None), int)}


def from_timm(source: str, key: str = KEY) -> Weights:
    """Return the pretrained weights of a timm model, `timm:NAME`. Raises UserError when there are none."""
    name = source.removeprefix(TIMM)
    if not timm.models.is_model_pretrained(name):
        known = timm.list_models(pretrained=True)
        raise UserError(f"{key}={TIMM}{name}: timm has no weights of this name{config.nearest(name, known)}")
    try:
        overlay = hub.timm_overlay(timm.get_pretrained_cfg(name))
        model: nn.Module = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
    except UserError as e:
        raise UserError(f"{key}={TIMM}{name}: {e}") from None
    except Exception as e:  # of many libraries: no network, a full disk, no such file
        why = (str(e).splitlines() or [""])[0]
        raise UserError(f"{key}={TIMM}{name}: cannot be fetched ({type(e).__name__}: {why})") from None
    settings = timm.get_pretrained_cfg(name)
    assert settings is not None  # its weights were just loaded by this name
    return from_module(source, model, key)._replace(pixels=Pixels(tuple(settings.mean), tuple(settings.std)))


def from_hub(source: str, key: str = KEY) -> Weights:
    """Return the weights of a repository of the Hugging Face Hub, `hf:NAME`. Raises UserError when there are none."""
    repository = source.removeprefix(HF)
    try:
        file = hub.fetch(repository)
    except UserError as e:
        raise UserError(f"{key}={source}: {e}") from None
    return from_tensors(source, load_tensors(file, key), key)._replace(pixels=hub_pixels(repository))


def hub_pixels(repository: str) -> Pixels | None:
    """Return the mean and deviation that a repository of the Hub says beside its weights; None if it says none."""
    for name, keys in CONFIGS.items():
        try:
            stated = json.loads(hub.fetch(repository, [name]).read_text())
            inside = stated.get("pretrained_cfg", stated)
            if inside.get("do_normalize", True) is False:
                return Pixels((0.0,) * 3, (1.0,) * 3)
            mean, std = (tuple(float(x) for x in inside[key]) for key in keys)
        except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # it has no such file, or one that says nothing of pixels
        if len(mean) == len(std) == len(OURS.mean) and min(std) > 0:
            return Pixels(mean, std)
    return None


def load_tensors(path: Path, key: str = KEY) -> dict[str, Any]:
    """Read a .safetensors or PyTorch file. Raises UserError when it holds more than tensors and plain values."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals(OPTIONS):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError) as e:
        raise UserError(f"{key}={path}: cannot be read ({type(e).__name__})") from None
    except Exception as e:  # pickle's, where the file wants to run code
        why = str(e).split(". ")[0].splitlines()[0]
        raise UserError(f"{key}={path}: holds more than tensors; store its state dict alone ({why})") from None
    if not isinstance(state, Mapping):
        raise UserError(f"{key}={path}: expected tensors by name, found a {type(state).__name__}")
    return dict(state)


def _bare(key: str) -> str:
    """Return a parameter's name without the prefixes of DistributedDataParallel and torch.compile."""
    for wrapper in ("module.", "_orig_mod."):
        key = key.removeprefix(wrapper)
    return key


def _readings(state: dict[str, Tensor], model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the possible readings of a file: the tensors under each prefix, with their own names, then with timm's."""
    rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    for below in _below_prefixes(state):
        yield below
        try:
            renamed = rename(dict(below), model) if rename and below else below
        except (AttributeError, KeyError, ValueError, RuntimeError, AssertionError):  # names that timm does not know
            continue
        # timm's names, but neither its resizing nor its sums of tensors: see resample.py. A name that timm moves, such
        # as that of a Swin's downsampling, is another tensor there, of another shape.
        mine = {k for k, v in renamed.items() if k in below and (has_any_size(k) or below[k].shape == v.shape)}
        yield {k: below[k] if k in mine else v for k, v in renamed.items()}


def _below_prefixes(state: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for prefix in PREFIXES:
        below = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        yield below
        if any(CHUNK.match(k) for k in below):
            yield {CHUNK.sub(r"blocks.\1", k): v for k, v in below.items()}


def _fitting(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> int:
    """Count the elements of the model's tensors that `state` has in the same shape, or in one that is resampled."""
    return sum(t.numel() for k, t in own.items() if k in state and (state[k].shape == t.shape or has_any_size(k)))


def size(tensor: Tensor) -> str:
    """Return the shape of a tensor as text, such as 1x197x384."""
    return "x".join(map(str, tensor.shape)) or "scalar"
