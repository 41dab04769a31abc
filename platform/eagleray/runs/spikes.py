"""Detect spikes of the gradient norm and the layer in which they began, as in figure 4 of Chen, Xie and He 2021,
arXiv:2104.02057."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HISTORY = 100  # steps that a layer's usual norm is the median of
WARM = 30  # steps before anything is called a spike
FACTOR = 20.0  # times the median; and SIGMAS of the noise of log norms, whichever is more
SIGMAS = 8.0
TINY = 1e-30  # instead of a norm of zero
SPREAD = 50  # steps within which other layers follow a spike, or it is over


@dataclass(frozen=True)
class Spike:
    """A stretch of steps with gradient norms far above their median."""

    step: int  # the first
    layers: tuple[tuple[str, int, float], ...]  # name, steps after the first, largest factor of its median
    lasted: int | None  # steps until all layers were below twice their medians; None: not within SPREAD

    @property
    def first(self) -> str:
        """Return the layer in which the spike began."""
        return self.layers[0][0]

    def __str__(self) -> str:
        worst = max(factor for _, _, factor in self.layers)
        text = f"gradients {worst:.0f} times their median, first in {self.first}"
        later = [f"{name} {after} steps later" for name, after, _ in self.layers if after][-1:]
        text += f", {later[0]}" if later else ", in all layers at once" if len(self.layers) > 1 else ""
        return text + (
            f"; over after {self.lasted} steps" if self.lasted is not None else f"; not over in {SPREAD} steps"
        )


class Spikes:
    """Reads the norms of every step, and returns each spike once it is over or has lasted SPREAD steps."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = list(layers)
        self.usual = np.zeros((0, len(layers)))  # the last HISTORY steps without a spike
        self.hit: dict[int, tuple[int, float]] = {}  # layers that jumped: the step and the largest factor since

    def state_dict(self) -> dict[str, Any]:
        hit = [[layer, *reached] for layer, reached in self.hit.items()]
        return {"usual": self.usual.tolist(), "hit": hit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.usual = np.array(state["usual"], np.float64).reshape(-1, len(self.layers))
        self.hit = {int(layer): (int(step), float(largest)) for layer, step, largest in state["hit"]}

    def add(self, step: int, norms: Sequence[float]) -> Spike | None:
        """Add the norms (L layers,) of one step, and return the spike that ends with it, if any. Norms that are not
        finite are left out: they belong to a skipped step."""
        now = np.asarray(norms)
        if not np.isfinite(now).all():
            return None
        if len(self.usual) < WARM:
            self.usual = np.vstack([self.usual, now])
            return None
        middle = np.maximum(np.median(self.usual, 0), TINY)
        factor = now / middle
        for i in np.flatnonzero(factor > threshold(self.usual, middle)).tolist():
            at, largest = self.hit.get(i, (step, 0.0))
            self.hit[i] = at, max(largest, float(factor[i]))
        calm = bool((factor < 2).all())
        if not self.hit:
            self.usual = np.vstack([self.usual, now])[-HISTORY:]  # what is in a spike is not usual
            return None
        began = min(at for at, _ in self.hit.values())
        return self._over(step - began, calm=calm) if calm or step - began >= SPREAD else None

    def _over(self, lasted: int, *, calm: bool) -> Spike:
        order = sorted(self.hit.items(), key=lambda item: item[1][0])
        began = order[0][1][0]
        found = tuple((self.layers[i], at - began, factor) for i, (at, factor) in order)
        self.hit = {}
        if not calm:
            self.usual = self.usual[:0]  # this is how it is now
        return Spike(began, found, lasted if calm else None)


def threshold(usual: NDArray[np.float64], middle: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return factors (L,) of the median above which a norm is a spike and not noise: SIGMAS robust deviations of the
    logs of the norms so far (n, L), and at least FACTOR."""
    noise = 1.4826 * np.median(np.abs(np.log(np.maximum(usual, TINY) / middle)), 0)
    return np.maximum(FACTOR, np.exp(np.minimum(SIGMAS * noise, 50.0)))
