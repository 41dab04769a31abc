"""Seeds random generators: for the draws of a step, and those of Python and NumPy, because timm draws from them."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_lock = threading.Lock()  # the loader's thread draws too where there are no loader processes


@contextmanager
def seed_global_generators(seed: int) -> Iterator[None]:
    """Seed both global generators, with a seed below 2**32, and restore their states when the block ends."""
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
    """Return a generator seeded by `Progress.draw`, which follows from the step and the recipe's seed. A method draws
    for the rows of all ranks with it and takes its own rows, so the draw is the same for any number of ranks and after
    a restart."""
    return torch.Generator(device).manual_seed(seed)
