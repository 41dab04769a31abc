"""Seeds random generators: one for the draws of a step, and the global ones of Python and NumPy, which timm uses."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_lock = threading.Lock()  # a loader thread draws too if there are no loader processes


@contextmanager
def seed_global_generators(seed: int) -> Iterator[None]:
    """A context that seeds the global generators of Python and NumPy (seed < 2**32), and then restores their states."""
    with _lock:
        before = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def step_generator(seed: int, device: torch.device) -> torch.Generator:
    """Return a generator with the seed `Progress.draw`, which depends on the step and the recipe's seed alone. A method
    draws for the rows of all ranks and uses its own, so draws do not change with the number of ranks or a restart."""
    return torch.Generator(device).manual_seed(seed)
