"""Finds the tensors of a backbone in a file: those that fit best of all mappings, prefixes and schools of names.

Where several fit equally well, an average comes before the weights that it is of, and the network that its authors
evaluate before the other one.
"""

import contextlib
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from eagleray.models.resample import has_any_size
from eagleray.models.tensor_files import State, bare

# Words in the names of mappings and prefixes, the preferred ones first. Those of BYOL and MoCo v3 evaluate the trained
# encoder, whose copy may be the target; I-JEPA's the target, whose original has no such word; DINO's the teacher.
AVERAGES = {"ema", "averaged", "swa"}
PREFERRED: list[set[str]] = [{"online", "base", "q", "query"}, {"target"}, set(), {"teacher"}, {"student"}]
PREFERRED += [{"momentum", "k", "key"}, {"optimizer", "optim", "exp"}]
USUAL = ("state_dict", "model")  # names of mappings that are preferred to other ones
LEAST = 0.5  # the share of a backbone's elements, or of all that there are, below a prefix that is tried
CHUNK = re.compile(r"blocks\.\d+\.(\d+\.)")  # DINOv2 numbers groups of blocks, and the blocks of all groups


class Place(NamedTuple):
    """The place of tensors in a file: a mapping and a prefix of the names in it."""

    mapping: str  # its keys from the outside in, such as `state_dict`; empty: the outermost
    prefix: str  # such as `backbone.`
    tensors: State  # the tensors of the whole mapping

    def __str__(self) -> str:
        return ".".join(filter(None, (self.mapping, self.prefix.rstrip(".")))) or "the file itself"

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Return how late this place is taken where others fit as well."""
        words = set(re.split(r"[._]", f"{self.mapping}.{self.prefix}".lower()))
        roles = [n for n, role in enumerate(PREFERRED) if role & words]
        usual = next((n for n, name in enumerate(USUAL) if name in self.mapping), len(USUAL))
        return max(roles, default=PREFERRED.index(set())), not words & AVERAGES, usual


def best(places: Mapping[str, State], model: nn.Module) -> tuple[Place, State, list[str]]:
    """Return where the tensors stand that fit a model best, the tensors by the model's names, and the other places
    whose tensors fit as well and that no rule puts behind."""
    own: State = model.state_dict()
    found = [(place, read) for place in _places(places, own) for read in _readings(place, model)]
    fitting = [_fitting(read, own) for _, read in found]
    first = [entry for entry, fits in zip(found, fitting, strict=True) if fits == max(fitting)]
    place, read = min(first, key=lambda entry: entry[0].rank)  # the first of equals
    taken = {id(v) for k, v in read.items() if k in own}
    others = {str(p): None for p, r in first if max(fitting) and not taken & {id(v) for k, v in r.items() if k in own}}
    return place, read, list(others)


def _places(places: Mapping[str, State], own: State) -> Iterator[Place]:
    """Yield the places in a file below which there are enough elements, or most, the outer ones first."""
    sizes: Counter[tuple[str, str]] = Counter()
    for mapping, tensors in places.items():
        for name, tensor in tensors.items():
            for dot in (0, *(m.end() for m in re.finditer(r"\.", name))):
                sizes[mapping, name[:dot]] += tensor.numel()
    least = LEAST * min(sum(t.numel() for t in own.values()), max(sizes.values(), default=0))
    yield from (Place(*place, places[place[0]]) for place, size in sizes.items() if size >= least)


def _readings(place: Place, model: nn.Module) -> Iterator[State]:
    """Yield the possible readings of the tensors at a place: with their own names, then with timm's."""
    own = {bare(k): k for k in model.state_dict()}  # a model may have a wrapper's name among its own
    below = {k.removeprefix(place.prefix): v for k, v in place.tensors.items() if k.startswith(place.prefix)}
    below = {own.get(k, k): v for k, v in below.items()}
    yield from _renamed(below, model)
    if any(CHUNK.match(k) for k in below):
        yield from _renamed({CHUNK.sub(r"blocks.\1", k): v for k, v in below.items()}, model)


def _renamed(below: State, model: nn.Module) -> Iterator[State]:
    """Yield tensors with the names that they have, then with those that timm makes of its authors' names."""
    yield below
    rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if rename is None:
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # timm prints its errors
            renamed = rename(dict(below), model)
    except (AttributeError, KeyError, ValueError, RuntimeError, AssertionError):  # names that timm does not know
        return
    # timm's names, but neither its resizing nor its sums of tensors: see resample.py. A name that timm moves, such
    # as that of a Swin's downsampling, is another tensor there, of another shape.
    mine = {k for k, v in renamed.items() if k in below and (has_any_size(k) or below[k].shape == v.shape)}
    yield {k: below[k] if k in mine else v for k, v in renamed.items()}


def _fitting(state: State, own: State) -> int:
    """Count the elements of the model's tensors that `state` has in the same shape, or in one that is resampled."""
    return sum(t.numel() for k, t in own.items() if k in state and (state[k].shape == t.shape or has_any_size(k)))
