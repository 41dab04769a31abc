"""Seeds random generators: one for each step, and the global generators of Python and NumPy, which timm uses."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_lock = threading.Lock()  # without loader processes, threads of this process seed the global generators, too


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
    """Return the generator for the random numbers of a step. `seed` is `Progress.draw`, which follows from the step and
    the recipe alone. Each rank draws the rows of all ranks and uses its own rows, so neither the number of ranks nor a
    restart changes the numbers."""
    return torch.Generator(device).manual_seed(seed)
