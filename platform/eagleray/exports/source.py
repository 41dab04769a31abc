"""Restore the backbone that is to be exported from a run, with the preprocessing of its images and its origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from eagleray.base.errors import UserError
from eagleray.engine.export import keys_of
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone, Encoder
from eagleray.models.network import Network
from eagleray.runs import start
from eagleray.runs.recipe import Recipe
from eagleray.runs.restore import read_state, restored
from eagleray.runs.run_store import run_store
from eagleray.views.preprocessing import Preprocessing


@dataclass(frozen=True)
class Source:
    """A backbone to export. It is on the CPU, in evaluation mode and without parts that only training needs."""

    backbone: Backbone
    network: Network
    preprocessing: Preprocessing
    recipe: Recipe
    out: str  # the run's folder or s3:// URL
    folder: Path  # the run's files on this machine
    step: int | None  # step of the checkpoint that was named; None: the newest checkpoint
    what: str | None  # which encoder of the method to export; None: the method's choice
    evaluated: bool  # whether the run's own evaluations are of this backbone
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # tensors outside backbones, by names all methods share
    role: str = ""  # student or teacher, if the backbone is part of one of them
    steps: int | None = None  # number of steps for which the weights were trained; None: unknown

    def features(self, images: Tensor) -> Tensor:
        """Return the pooled vectors (B, D) of images (B, N, H, W) with N channels."""
        with torch.inference_mode():
            return self.backbone.pooled(images)


class Program(NamedTuple):
    """The Python code with which users load an export, prepare images and embed them."""

    text: str
    probes: Sequence[tuple[int, int, int]] = ()  # shapes (B, H, W) of noise for which the export is also compared
    step: int | None = None  # image sides may be multiples of this many pixels; None: one size


def load_source(path: str, what: str | None = None) -> Source:
    """Restore the backbone of a run or a checkpoint. `what` names an encoder of its method, such as `student`. Raises
    UserError when there is no such encoder, or the backbone cannot be restored."""
    state, folder = read_state(path)
    recipe, method, _ = restored(path, state, folder)
    trained = method.export() if what is None else encoder(method, what, recipe).backbone
    backbone = fresh(recipe.backbone, trained)
    images = Preprocessing.of(recipe.evaluate.size, recipe.evaluate.resize, recipe.data.channels)
    steps = state["step"] if type(state.get("step")) is int else None
    if not (named := Path(path).is_file()):
        run_store(path).fetch()  # the card needs files of the run
    out = str(folder) if named else path
    evaluated = trained is method.export() and type(trained) is Backbone  # runs do not evaluate a subclass's pooling
    return Source(
        backbone,
        recipe.backbone,
        images,
        recipe,
        out,
        folder,
        steps if named else None,
        what,
        evaluated,
        start.parts_of(method),
        next((role for role, e in start.encoders(method).items() if e.backbone is trained), ""),
        steps,
    )


def encoder(method: Method, what: str, recipe: Recipe) -> Encoder:
    """Return the encoder `what` of a method. Raises UserError when the method has none of this name."""
    encoders = {name: m for name, m in method.named_children() if isinstance(m, Encoder)}
    if what not in encoders:
        raise UserError(f"--what {what}: {recipe.method.name} has no such encoder; it has {', '.join(encoders)}")
    return encoders[what]


def fresh(network: Network, trained: Backbone) -> Backbone:
    """Return a new backbone with trained weights, in evaluation mode."""
    backbone = Backbone(**keys_of(network))
    backbone.model.load_state_dict(trained.model.state_dict())
    backbone.merged = trained.merged
    return backbone.eval()


def with_own_grid(backbone: Backbone, network: Network, size: int) -> Backbone:
    """Return a backbone whose default image size is `size`. For this, the position table of a ViT is resampled once, as
    the backbone does for images of that size, because libraries may resample it in another way."""
    model = backbone.model
    if getattr(model, "pos_embed", None) is None or tuple(model.patch_embed.img_size) == (size, size):
        return backbone
    keys = keys_of(network)
    sized = Backbone(**keys | {"options": {**keys.get("options", {}), "img_size": size}})
    h, w = sized.model.patch_embed.grid_size
    rows = 0 if model.no_embed_class else model.num_prefix_tokens
    state = model.state_dict()
    with torch.inference_mode():
        tokens = model._pos_embed(torch.zeros(1, h, w, model.embed_dim))[:, model.num_prefix_tokens :]
        state["pos_embed"] = torch.cat([model.pos_embed[:, :rows], tokens], 1).clone()
    sized.model.load_state_dict(state)
    return sized.eval()
