"""Finds the tensors of a backbone in a file, and gives them the names and the shapes that they have in the model.

All mappings, prefixes and naming schemes are tried, and the tensors that fit the model best are taken. If several fit
equally well, averaged weights are preferred to those that they average, and of a network and its momentum copy the one
that the authors evaluate. N patches, P prefix tokens (class token and registers), D channels."""

import contextlib
import io
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from timm import layers
from torch import Tensor, nn

from eagleray.models.tensor_files import State, unwrap_name

# Words in the names of mappings and prefixes, preferred ones first. Authors of BYOL and MoCo v3 evaluate the trained
# encoder, such as online or base, whose copy may be the target. I-JEPA's evaluate the target, and no word names the
# network that it copies. DINO's evaluate the teacher.
AVERAGES = {"ema", "averaged", "swa"}
PREFERRED: list[set[str]] = [{"online", "base", "q", "query"}, {"target"}, set(), {"teacher"}, {"student"}]
PREFERRED += [{"momentum", "k", "key"}, {"optimizer", "optim", "exp"}]
USUAL = ("state_dict", "model")  # names of mappings that are preferred to others
LEAST = 0.5  # a prefix is tried if it has this share of the backbone's elements, or of the file's if these are fewer
BIAS = ".attn.qkv.bias"
CHUNK = re.compile(r"blocks\.\d+\.(\d+\.)")  # DINOv2's blocks.GROUP.BLOCK, where BLOCK counts through all groups


class Place(NamedTuple):
    """The place of tensors in a file: a mapping, and a prefix of the names in it."""

    mapping: str  # keys from the outside in, e.g. `state_dict`; empty: the outermost mapping
    prefix: str  # e.g. `backbone.`
    tensors: State  # the tensors of the whole mapping

    def __str__(self) -> str:
        return ".".join(filter(None, (self.mapping, self.prefix.rstrip(".")))) or "the file itself"

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Return a sort key: of places whose tensors fit equally well, the one with the smallest key is preferred."""
        words = set(re.split(r"[._]", f"{self.mapping}.{self.prefix}".lower()))
        roles = [n for n, role in enumerate(PREFERRED) if role & words]
        unnamed = -1 if words & AVERAGES else PREFERRED.index(set())  # an average of `online_model` is `ema_model`
        usual = next((n for n, name in enumerate(USUAL) if name in self.mapping), len(USUAL))
        return max(roles, default=unnamed), not words & AVERAGES, usual


def best(places: Mapping[str, State], model: nn.Module) -> tuple[Place, State, list[str]]:
    """Return the place whose tensors fit a model best, its tensors under the model's names, and the names of all places
    that fit equally well with entirely different tensors."""
    own: State = model.state_dict()
    found = [(place, read) for place in _places(places, own) for read in _readings(place, model)]
    fitting = [_fitting(read, own) for _, read in found]
    first = [entry for entry, fits in zip(found, fitting, strict=True) if fits == max(fitting)]
    place, read = min(first, key=lambda entry: entry[0].rank)  # `min` takes the first of places with the same rank
    taken = {id(v) for k, v in read.items() if k in own}
    others = {str(p): None for p, r in first if max(fitting) and not taken & {id(v) for k, v in r.items() if k in own}}
    return place, read, list(others)


def _places(places: Mapping[str, State], own: State) -> Iterator[Place]:
    """Yield the places in a file that have enough elements (LEAST), each before the places inside of it."""
    sizes: Counter[tuple[str, str]] = Counter()
    for mapping, tensors in places.items():
        for name, tensor in tensors.items():
            for dot in (0, *(m.end() for m in re.finditer(r"\.", name))):
                sizes[mapping, name[:dot]] += tensor.numel()
    least = LEAST * min(sum(t.numel() for t in own.values()), max(sizes.values(), default=0))
    yield from (Place(*place, places[place[0]]) for place, size in sizes.items() if size >= least)


def _readings(place: Place, model: nn.Module) -> Iterator[State]:
    """Yield the tensors at a place under each set of names that may be right: the file's names, then timm's."""
    own = {unwrap_name(k): k for k in model.state_dict()}  # some models' own names contain what `unwrap_name` removes
    below = {k.removeprefix(place.prefix): v for k, v in place.tensors.items() if k.startswith(place.prefix)}
    below = {own.get(k, k): v for k, v in below.items()}
    yield from _renamed(below, model)
    if any(CHUNK.match(k) for k in below):
        yield from _renamed({CHUNK.sub(r"blocks.\1", k): v for k, v in below.items()}, model)


def _renamed(below: State, model: nn.Module) -> Iterator[State]:
    """Yield tensors with their own names, then with the names that timm gives to tensors of the model's authors."""
    yield below
    rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if rename is None:
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # timm prints its errors
            renamed = rename(dict(below), model)
    except (AttributeError, KeyError, ValueError, RuntimeError, AssertionError):  # names that timm does not know
        return
    # Only the names are taken from timm; `shaped` resizes tensors. timm moves some names to another layer, as in Swin's
    # downsampling. Such a name is in `below` too, but for another tensor, which has another shape.
    mine = {k for k, v in renamed.items() if k in below and (has_any_size(k) or below[k].shape == v.shape)}
    # timm drops DINOv3's qkv biases for models without such biases. Biases other than zero are kept, as the features
    # would differ without them.
    kept = {k: v for k, v in below.items() if k.endswith(BIAS) and not _has_bias(k, renamed) and v.any()}
    yield {k: below[k] if k in mine else v for k, v in renamed.items()} | kept


def _has_bias(key: str, renamed: Mapping[str, Tensor]) -> bool:
    return key in renamed or key.replace(BIAS, ".attn.q_bias") in renamed


def _fitting(state: State, own: State) -> int:
    """Return the number of elements of the model's tensors that `state` has in the same shape, or resampled."""
    return sum(t.numel() for k, t in own.items() if k in state and (state[k].shape == t.shape or has_any_size(k)))


NAMES = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.", ""),
    (r"^encoder\.layer\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.(?:layernorm_before|norm1)\.", ".norm1."),
    (r"\.(?:layernorm_after|norm2)\.", ".norm2."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
)
# DINOv3's names in transformers become the authors' names for ViTs, as timm reads these, and timm's for ConvNeXts.
DINOV3 = (
    (r"^embeddings\.patch_embeddings\.", "patch_embed.proj."),
    (r"^embeddings\.register_tokens$", "storage_tokens"),
    (r"^embeddings\.", ""),
    (r"^(?:model\.)?layer\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.up_proj\.", ".mlp.fc1."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
)
CONVNEXT = (
    (r"^(?:model\.)?stages\.0\.downsample_layers\.", "stem."),
    (r"^(?:model\.)?(stages\.\d+\.downsample)_layers\.", r"\1."),
    (r"^(?:model\.)?(stages\.\d+)\.layers\.", r"\1.blocks."),
    (r"\.depthwise_conv\.", ".conv_dw."),
    (r"\.pointwise_conv(\d)\.", r".mlp.fc\1."),
    (r"\.layer_norm\.", ".norm."),
    (r"^layer_norm\.", "head.norm."),
)
# Matches one typical key of each naming scheme in SCHOOLS. Group 1 is a prefix such as vit.; the last group that
# matches tells which scheme it is.
FIRST = re.compile(
    r"((?:.*?\.)??)(?:encoder\.layer\.\d+\.attention\.attention\.(query)|(?:model\.)?layer\.\d+\.attention\.(q_proj)|"
    r"(?:model\.)?stages\.\d+\.layers\.\d+\.(depthwise_conv))\."
)
SCHOOLS = {"query": NAMES, "q_proj": DINOV3, "depthwise_conv": CONVNEXT}
QUERY = re.compile(r"\.attention\.(attention\.query|q_proj)\.(weight|bias)$")
OTHERS = re.compile(r"\.attention\.(attention\.(key|value)|[kv]_proj)\.(weight|bias)$")
PARTS = {"attention.query": ("attention.key", "attention.value"), "q_proj": ("k_proj", "v_proj")}


def to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with timm's names, and queries, keys and values joined. Other tensors stay as they are."""
    first = next((match for key in state if (match := FIRST.match(key))), None)
    if first is None:
        return state
    names = SCHOOLS[first[first.lastindex or 0]]
    out: dict[str, Tensor] = {}
    state = {key.removeprefix(first[1]): value for key, value in state.items()}
    for key, value in state.items():
        if match := QUERY.search(key):
            others = (key.replace(match[1], part) for part in PARTS[match[1]])
            # DINOv3 has no bias for keys, so zeros take its place.
            parts = [value, *(state.get(other, torch.zeros_like(value)) for other in others)]
            out[f"{_timm_name(key[: match.start() + 1], names)}attn.qkv.{match[2]}"] = torch.cat(parts)
        elif not OTHERS.search(key):
            out[_timm_name(key, names)] = value
    return out


def _timm_name(key: str, names: tuple[tuple[str, str], ...]) -> str:
    for pattern, name in names:
        key = re.sub(pattern, name, key)
    return key


TABLE = "relative_position_bias_table"
POSITIONS = "pos_embed"
PATCHES = "patch_embed.proj.weight"


def has_any_size(key: str) -> bool:
    """Return whether a tensor of this name is resampled if it has another shape than the model's."""
    return key.endswith((POSITIONS, TABLE, PATCHES))


def shaped(model: Any, key: str, value: Tensor, own: Mapping[str, Tensor]) -> Tensor | None:
    """Return the tensor in the shape that it has in the model, or None where it does not fit."""
    if key not in own or value.shape == own[key].shape:
        return value if key in own else None
    want = own[key].shape
    if not has_any_size(key) or value.ndim != len(want):
        return None
    if key.endswith(PATCHES):
        return layers.resample_patch_embed(value, list(want[2:])) if value.shape[:2] == want[:2] else None
    if value.shape[-1] != want[-1]:
        return None
    if key.endswith(TABLE):
        window = model.get_submodule(key.rpartition(".")[0]).window_size
        return layers.resize_rel_pos_bias_table(value, new_window_size=window, new_bias_shape=tuple(want))
    if len(want) == 4:  # (1, h, w, D), as in SAM and VOLO; below the top level, axes have other meanings
        return layers.resample_abs_pos_embed_nhwc(value, list(want[1:3])) if key == POSITIONS else None
    return _positions(value, list(model.patch_embed.grid_size), want[1])


def _positions(table: Tensor, grid: list[int], rows: int) -> Tensor | None:
    """Return a position table (1, P + N, D) for another grid and number of prefix tokens.

    Returns None when the table's patches form no square. The class token comes first; a prefix token that the table
    lacks gets the position zero."""
    prefix = rows - math.prod(grid)
    had = next((p for p in (prefix, 1, 0) if (n := table.shape[1] - p) > 0 and math.isqrt(n) ** 2 == n), None)
    if had is None:
        return None
    if had != prefix:
        zeros = table.new_zeros(1, max(prefix - had, 0), table.shape[2])
        table = torch.cat([table[:, : min(had, prefix)], zeros, table[:, had:]], 1)
    return layers.resample_abs_pos_embed(table, new_size=grid, num_prefix_tokens=prefix)


def without_class_position(model: Any, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the class token's position added to that token, if only the file has such a position.

    timm's ViTs with registers have positions for patches alone."""
    table, token = state.get(POSITIONS), state.get("cls_token")
    if table is None or token is None or POSITIONS not in own or table.ndim != 3 or not table.shape[1]:
        return dict(state)
    has_row = math.isqrt(table.shape[1] - 1) ** 2 == table.shape[1] - 1
    if not has_row or own[POSITIONS].shape[1] != math.prod(model.patch_embed.grid_size):
        return dict(state)
    return {**state, "cls_token": token + table[:, :1], POSITIONS: table[:, 1:]}
