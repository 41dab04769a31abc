"""Benchmarks as modules, for tests of their parts."""

import runpy
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_benchmark(name: str) -> dict[str, Any]:
    """Return the globals of a program below benchmarks/, which imports others from there; its `main` does not run."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return runpy.run_path(str(BENCHMARKS / name))
    finally:
        sys.path.remove(str(BENCHMARKS))
