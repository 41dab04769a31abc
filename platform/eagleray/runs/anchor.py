"""Keep patches as similar to each other as in the backbone that a run has started from, by Gram anchoring."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.losses.gram import gram_loss
from eagleray.methods.method import Method
from eagleray.models.backbone import Backbone
from eagleray.runs.recipe import Recipe
from eagleray.runs.start import STUDENT, encoders


class Anchor:
    """A frozen copy of the backbone at the start, which is part of the checkpoints; none without `start.anchor`."""

    def __init__(self, recipe: Recipe, method: Method) -> None:
        """Copy the backbone that the method exports, after it has taken over what `start` names."""
        self.weight = recipe.start.anchor if recipe.start else 0.0
        self.backbone = copy.deepcopy(method.export()).requires_grad_(False).eval() if self.weight else None

    def state_dict(self) -> dict[str, Any]:
        return self.backbone.state_dict() if self.backbone else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.backbone:
            self.backbone.load_state_dict(state)

    def joined(self, method: Method) -> nn.Module:
        """Return a module that is called as the method is, and whose loss includes the anchor's."""
        return Anchored(method, self.backbone, self.weight) if self.backbone else method


class Anchored(nn.Module):
    """A method whose loss includes that of an anchor, by the patches of the first view."""

    def __init__(self, method: Method, backbone: Backbone, weight: float) -> None:
        super().__init__()
        self.method, self.weight = method, weight
        self.anchor = [backbone]  # a list keeps it out of this module's parameters: it neither trains nor is averaged
        self.trained = [encoders(method)[STUDENT].backbone]

    def forward(self, batch: Batch, at: Progress) -> dict[str, Tensor]:
        """Return the scalars of the method and `anchor`, which `loss` includes."""
        out: dict[str, Tensor] = self.method(batch, at)
        [anchor], [trained] = self.anchor, self.trained
        with torch.no_grad():
            before = anchor(batch.views[0]).patches
        anchored = gram_loss(trained(batch.views[0]).patches, before)
        return out | {"loss": out["loss"] + self.weight * anchored, "anchor": anchored}
