"""Reads pretrained weights from timm, the Hub or a file of tensors, and matches them with a backbone, key by key."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import timm
from torch import Tensor, nn

from eagleray import config
from eagleray.base.errors import UserError, explained
from eagleray.models import hub, pixels
from eagleray.models.backbone import Backbone
from eagleray.models.layer_names import in_adapter
from eagleray.models.network import HF, TIMM
from eagleray.models.pixels import OURS, Pixels
from eagleray.models.readings import BIAS, best, shaped, to_timm, without_class_position
from eagleray.models.tensor_files import KEY, State, load_tensors, mappings

ENOUGH = 0.95  # least share of a backbone's parameters in a source
# Files that transformers and timm store beside weights on the Hub, and the keys of the pixel mean and std in them.
CONFIGS = {"preprocessor_config.json": ("image_mean", "image_std"), "config.json": ("mean", "std")}
REGISTERS = ("reg_token", "register_tokens")
BUFFERS = {"relative_position_index", "attn_mask"}  # buffers that timm no longer stores
# Tensors that a backbone may lack, and the option that adds them.
ADDED = {".ls1.gamma": "backbone.options.init_values=1e-5", BIAS: "backbone.name=NAME_qkvb"} | dict.fromkeys(
    REGISTERS, "backbone.options.reg_tokens=N"
)
SOME = 3  # most keys that an error names


class Weights(NamedTuple):
    """Tensors by name, and the number of attention heads by module if the source tells it, as shapes do not show it."""

    source: str
    state: State
    heads: dict[str, int]
    key: str = KEY  # the key of the recipe that named the source; empty without a recipe
    pixels: Pixels | None = OURS  # pixel mean and std that the weights were trained with; None: the source lacks them
    places: Mapping[str, State] = {}  # used instead of `state` for a file: the tensors of each of its mappings
    unread: Sequence[str] = ()  # classes of objects in the file that were not read

    @property
    def given(self) -> str:
        """The source as `key=source`, as a recipe states it; the source alone if no recipe names it."""
        return f"{self.key}={self.source}" if self.key else self.source

    def unconverted(self) -> "Weights":
        """Return the same weights for a backbone whose images already have the mean and std of these weights."""
        return self if self.pixels is None else self._replace(pixels=OURS)


@dataclass(frozen=True)
class FillReport:
    """The keys of a backbone that a source matched, resized or lacked, and the keys of the source that were not used.

    A key is followed by its shapes if they differ."""

    source: str
    matched: Sequence[str]
    resized: Sequence[str]
    missing: Sequence[str]
    left: Sequence[str]
    share: float  # share of the backbone's parameters that was filled, by number of elements
    warning: str = ""  # warning about the pixel mean and std of the weights' training
    choice: str = ""  # note on the tensors' place in the file, if tensors at other places fit as well

    def __str__(self) -> str:
        counts = f"{len(self.matched)} tensors matched, {len(self.resized)} resized, {len(self.missing)} missing"
        share = f"{self.share:.1%} of the backbone's parameters{self.choice and '; '}{self.choice}"
        return f"{self.source}: {counts}, {len(self.left)} left over; {share}"

    def lines(self) -> Iterator[str]:
        """Yield the summary and the warning, then a line for every key."""
        yield str(self)
        yield from [f"warning: {self.warning}"] * bool(self.warning)
        for kind in ("matched", "resized", "missing"):
            yield from (f"{kind:<10} {key}" for key in getattr(self, kind))
        yield from (f"{'left over':<10} {key}" for key in self.left)


def from_tensors(source: str, tensors: Mapping[str, Any], key: str = KEY) -> Weights:
    """Return the tensors of a file, from which `fill` chooses some. Raises UserError when the file has none."""
    places, unread = mappings(tensors)
    if not places and unread:
        raise UserError(f"{key}={source}: holds more than tensors; store its state dict alone (it has a {unread[0]})")
    if not places:
        keys = f"; its keys are {first_names(list(map(str, tensors)))}" if tensors else ""
        raise UserError(f"{key}={source}: holds no tensors by name{keys}")
    named = {place: to_timm(state) for place, state in places.items()}
    return Weights(source, {}, {}, key, places=named, unread=unread)


def from_module(source: str, model: nn.Module, key: str = KEY) -> Weights:
    """Return the weights of a model, with its numbers of attention heads."""
    return Weights(source, model.state_dict(), _heads(model), key)


def fill(backbone: Backbone, weights: Weights, *, whole: bool = False) -> FillReport:
    """Copy the tensors that fit into the backbone, which then takes pixels normalised with our mean and std.

    Raises UserError when less than the share `ENOUGH` of the backbone's parameters fits, and when the shapes agree but
    the architecture is another one; with `whole` also when the source has layers inside of its backbone that this
    backbone lacks, so that features would differ."""
    model = backbone.model
    own: State = {k: v for k, v in model.state_dict().items() if not in_adapter(k)}
    place, state, others = best(weights.places or {"": weights.state}, model)
    moved = without_class_position(model, state, own)
    fitted = {k: v for k, v in ((k, shaped(model, k, v, own)) for k, v in moved.items()) if v is not None}
    if packed := next((k for k, v in fitted.items() if own[k].is_floating_point() and v.itemsize < 2), ""):
        raise UserError(f"{weights.given}: {packed} is quantised ({fitted[packed].dtype}); expected 16 bits or more")
    check_finite(weights, fitted)
    resized = [k for k in fitted if fitted[k].shape != state[k].shape]
    used = {id(state[k]) for k in fitted}
    parameters = {name: p.numel() for name, p in model.named_parameters() if name in own}
    report = FillReport(
        weights.source,
        matched=[k for k in fitted if k not in resized],
        resized=[f"{k} {shape_text(fitted[k])} of {shape_text(state[k])}" for k in resized],
        missing=[
            k + (f" {shape_text(own[k])}, is {shape_text(state[k])}" if k in state else "")
            for k in own
            if k not in fitted
        ],
        left=[k for k, v in place.tensors.items() if id(v) not in used],
        share=sum(n for name, n in parameters.items() if name in fitted) / sum(parameters.values()),
        warning=_convert(model, weights, fitted),
        choice=f"taken from {place}; as well would fit {first_names(others)}" if others else "",
    )
    _check(model, weights, report, fitted, state)
    if whole:
        _check_whole(model, weights, state)
    model.load_state_dict(fitted, strict=False)
    return report


def _convert(model: nn.Module, weights: Weights, fitted: dict[str, Tensor]) -> str:
    """Convert tensors to our pixel mean and std. Return a warning if that is impossible, else an empty text."""
    if weights.pixels is None:
        return f"{weights.given}: its repository says no mean and deviation of pixels; it gets ours, {OURS}"
    if pixels.convert(model, fitted, weights.pixels):
        return ""
    return (
        f"{weights.given}: was trained with pixels of {weights.pixels}, and gets ours, {OURS}: the first layer of "
        f"{type(model).__name__} cannot convert them exactly"
    )


def check_finite(weights: Weights, tensors: Mapping[str, Tensor]) -> None:
    """Raises UserError when a tensor has a value that is not finite, as then no loss would be finite."""
    wrong = next((k for k, v in tensors.items() if v.is_floating_point() and not v.isfinite().all()), None)
    if wrong:
        raise UserError(f"{weights.given}: {wrong} has values that are NaN or infinite")


def _check(
    model: nn.Module, weights: Weights, report: FillReport, fitted: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Raises UserError when too few tensors fit, or when attention heads or batch norms differ from the model's."""
    given = weights.given
    if report.share < ENOUGH:
        much = f"has {report.share:.1%} of the backbone's parameters, expected {ENOUGH:.0%} or more"
        has = f"; it has {first_names(report.left)}" if report.left else ""
        has += f"; a {weights.unread[0]} in it was not read" if weights.unread else ""
        raise UserError(f"{given}: {much}; missing: {first_names(report.missing)}{has}")
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
    """Raises UserError when the weights have layers inside of their backbone that the model lacks."""
    own, buffers = model.state_dict(), {name.rpartition(".")[2] for name, _ in model.named_buffers()} | BUFFERS
    inside = {name for name, part in model.named_children() if next(part.parameters(), None) is not None}
    inside -= _classifiers(model)  # the norm in ConvNeXt's classifier belongs to the backbone
    extra = [k for k in state if k not in own and k.rpartition(".")[2] not in buffers]
    extra = [k for k in extra if k.partition(".")[0] in inside or k in REGISTERS]
    if not extra:
        return
    hint = next((f"; {option} adds them" for part, option in ADDED.items() if part in extra[0]), "")
    if extra[0] in REGISTERS:
        hint = hint.replace("N", str(state[extra[0]].shape[-2]))
    more = f" and {len(extra) - 1} more tensors" if extra[1:] else ""
    raise UserError(
        f"{weights.given}: has {extra[0]}{more} inside of the backbone, which {type(model).__name__} "
        f"lacks here; another architecture{hint}"
    )


def _classifiers(model: nn.Module) -> set[str]:
    """Return the top-level modules that contain a timm model's classifiers, which a backbone does not have."""
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
    overlay = hub.timm_overlay(timm.get_pretrained_cfg(name), f"{key}={TIMM}{name}")
    # Many libraries raise here: without a network, on a full disk, for a missing file.
    with explained(f"{key}={TIMM}{name}: cannot be fetched", Exception):
        model: nn.Module = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
    settings = timm.get_pretrained_cfg(name)
    assert settings is not None  # the weights were just loaded by this name
    return from_module(source, model, key)._replace(pixels=Pixels(tuple(settings.mean), tuple(settings.std)))


def from_hub(source: str, key: str = KEY) -> Weights:
    """Return the weights of a repository of the Hugging Face Hub, `hf:NAME`. Raises UserError when there are none."""
    repository = source.removeprefix(HF)
    file = hub.fetch(repository, given=f"{key}={source}")
    found = from_tensors(source, load_tensors(file, key), key)
    return found._replace(pixels=hub_pixels(repository), heads=hub_heads(repository))


def hub_heads(repository: str) -> dict[str, int]:
    """Return the number of attention heads of each block that the config.json of a ViT of transformers states."""
    stated = hub_states(repository, "config.json")
    depth, heads = stated.get("num_hidden_layers"), stated.get("num_attention_heads")
    if not (isinstance(depth, int) and isinstance(heads, int)):  # a Swin has a list of heads
        return {}
    return dict.fromkeys((f"blocks.{n}.attn" for n in range(min(depth, 1000))), heads)


def hub_states(repository: str, name: str) -> dict[str, Any]:
    """Return the content of a JSON file beside the weights of a repository of the Hub; {} if it cannot be read."""
    try:
        found = json.loads(hub.fetch(repository, [name], given=repository).read_text())
    except (UserError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def hub_pixels(repository: str) -> Pixels | None:
    """Return the pixel mean and std that a repository of the Hub states beside its weights; None if it states none."""
    for name, keys in CONFIGS.items():
        stated = hub_states(repository, name)
        try:
            inside = stated.get("pretrained_cfg", stated)
            if inside.get("do_normalize", True) is False:
                return Pixels((0.0,) * 3, (1.0,) * 3)
            mean, std = (tuple(float(x) for x in inside[key]) for key in keys)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # nothing about pixels in it
        if len(mean) == len(std) == len(OURS.mean) and min(std) > 0:
            return Pixels(mean, std)
    return None


def first_names(names: Sequence[str]) -> str:
    """Return a text with the first SOME of `names`, and how many more there are."""
    return "; ".join(names[:SOME]) + (f"; and {len(names) - SOME} more" if names[SOME:] else "")


def shape_text(tensor: Tensor) -> str:
    """Return the shape of a tensor as text, such as 1x197x384."""
    return "x".join(map(str, tensor.shape)) or "scalar"
