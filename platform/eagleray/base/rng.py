"""Seeds random generators: one for the draws of a step, and the global ones of Python and NumPy, which timm uses."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_lock = threading.Lock()  # without loader processes, loader threads of this process draw too


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
    """Return a generator for the draws of a step. `seed` is `Progress.draw`, which only step and recipe determine. Each
    rank draws the rows of all ranks and uses its own, so neither the number of ranks nor a restart changes them."""
    return torch.Generator(device).manual_seed(seed)
