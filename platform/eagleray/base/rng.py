"""Other people's random choices, made ours: timm draws from Python's and NumPy's global generators."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_lock = threading.Lock()  # the loader's thread draws too where there are no loader processes


@contextmanager
def seed_global_generators(seed: int) -> Iterator[None]:
    """Both generators start from the seed, below 2**32, and are as they were afterwards."""
    with _lock:
        before = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
