"""The store that the chaos tests disturb, the recipe of their runs, and the run that nobody disturbed."""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chaos.check import Steps, steps
from chaos.job import COMMAND, Run
from helpers.s3.server import Swift

SAMPLES, BATCH, LANES = 330, 32, 8  # ten steps an epoch, and some samples left out
LONG, SHORT = 198, 42  # steps, with checkpoints at both
READERS = [(0, 2), (2, 1), (0, 3), (2, 2), (1, 2), (0, 1), (2, 0), (0, 0)]  # Ray workers, loader workers in each
RECIPE = f"""
method: {{name: mocov3, dim: 16, hidden: 32}}
backbone:
  name: vit_tiny_patch16_224
  options: {{img_size: 16, patch_size: 8, embed_dim: 24, depth: 2, num_heads: 3}}
views: [{{size: 16, scale: [0.3, 1.0], solarize: 0.1}}, {{size: 16, scale: [0.3, 1.0], blur: 0.5}}]
data: {{lanes: {LANES}}}
optim: {{batch: {BATCH}, epochs: 20, lr: {{value: 1.0e-3, warmup: 0.2, end: 0.0}}}}
evaluate: {{size: 16, resize: 16, probe_epochs: 0}}
checkpoint: {{steps: 3}}
log_steps: 20
"""


@dataclass(frozen=True)
class Site:
    """The server, the shards as they are in a folder, and the uninterrupted run on them."""

    swift: Swift
    shards: Path
    recipe: Path
    client: Any

    def upload(self, name: str) -> str:
        """The shards, indexed, in a place of their own."""
        for path in self.shards.glob("*.tar"):
            self.client.upload_file(str(path), "chaos", f"{name}/{path.name}")
        subprocess.run([COMMAND, "index", f"s3://chaos/{name}"], check=True, capture_output=True)
        return f"s3://chaos/{name}"


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run of LONG steps in one process."""

    run: Run
    steps: Steps


def outage(site: Site, seconds: float, *servers: str) -> None:
    """Servers of the store are killed, and started again after a while."""
    for name in servers:
        site.swift("kill9", name)
    time.sleep(seconds)
    site.swift("start")


def uninterrupted(run: Run, last: int, keys: Sequence[str]) -> Steps:
    """What one process is given that nobody disturbs: read, not trained on."""
    from chaos.trace.sitecustomize import traced

    from eagleray.data.loader import Loader
    from eagleray.engine import world
    from eagleray.runs import recipe
    from eagleray.runs.checks import make_plan
    from eagleray.runs.sources import resolve_paths
    from eagleray.storage import store
    from eagleray.storage.s3 import S3Store

    given = [*keys, f"data.train={run.data}", f"out={run.out}", "workers=0"]
    r = resolve_paths(recipe.load(str(run.recipe), given))
    alone = Run(run.recipe, run.data, run.out.with_name("alone"))
    alone.tracing.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(store.STORES, "s3", S3Store())  # that of an earlier test has the address of a server that is gone
        loader = Loader(make_plan(r).stream, rank=0, ranks=1, workers=0, device=world.local().device)
        patch.setenv("EAGLERAY_PACE", "0")
        patch.setenv("EAGLERAY_TRACE", str(alone.tracing))
        for _ in traced(Loader.batches)(loader, 0, last):
            pass
    return steps(alone.lines())
