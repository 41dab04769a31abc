"""What tests share: one thread, a quiet environment, and small labelled shards."""

import os
from pathlib import Path

import pytest
import torch

os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.setdefault("RAY_AUTH_MODE", "token")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and test/ shards of drawn pictures, 320 and 80."""
    from eagleray.cli.demo import pictures
    from eagleray.datasets.shards import write_shards

    folder = tmp_path_factory.mktemp("shards")
    for seed, (split, count) in enumerate((("train", 320), ("test", 80))):
        write_shards(pictures(seed, count), str(folder / split), size=300_000)
    return folder


SMALL = """
method: {name: mocov3, dim: 16, hidden: 32}
backbone: {name: vit_tiny_patch16_224, options: {img_size: 16, patch_size: 8, embed_dim: 24, depth: 2, num_heads: 3}}
views: [{size: 16, scale: [0.3, 1.0], solarize: 0.1}, {size: 16, scale: [0.3, 1.0], blur: 0.5}]
data: {lanes: 8, workers: 0}
optim: {batch: 32, epochs: 2, lr: {value: 1.0e-3, warmup: 0.2, end: 0.0}}
evaluate: {size: 16, resize: 16, probe_epochs: 5}
log_steps: 1
workers: 0
"""


# Every method at the size of a test: what its section and its views add to SMALL.
PAIR = "{size: 16, scale: [0.3, 1.0], solarize: 0.1}, {size: 16, scale: [0.3, 1.0], blur: 0.5}"
CROPS = f"[{PAIR}, {{size: 8, count: 2, scale: [0.1, 0.4]}}]"
METHODS = {
    "barlow_twins": "dim: 12, hidden: 16",
    "byol": "dim: 16, hidden: 32",
    "byol_regions": "dim: 16, hidden: 32, prototypes: 64, region_hidden: 32, bottleneck: 16",
    "densecl": "dim: 12, hidden: 16, queue: 64, momentum: {value: 0.9}",
    "dino": "prototypes: 64, hidden: 32, bottleneck: 16, freeze_last: 0.1",
    "drloc": "classes: 20, mixup: 0.0, cutmix: 0.0, pairs: 8, weight: {value: 0.5}, ema: 0.9",
    "esvit": "prototypes: 64, hidden: 32, bottleneck: 16, freeze_last: 0.1, region_from: 0.15",
    "instdisc": "dim: 12, negatives: 16, proximal: 1.0",
    "moby": "dim: 12, hidden: 16, queue: 64",
    "moco": "dim: 12, hidden: 16, queue: 64, momentum: {value: 0.9}, symmetric: true",
    "mocov3": "dim: 16, hidden: 32",
    "selfpatch": "prototypes: 64, patch_prototypes: 32, hidden: 32, bottleneck: 16, heads: 2, freeze_last: 0.1",
    "selfpatch_moby": "dim: 12, hidden: 16, queue: 64, patch_prototypes: 32, patch_hidden: 8, heads: 2, freeze_last: 0",
    "simclr": "dim: 12, hidden: 16",
    "simsiam": "dim: 24, hidden: 8",
    "supervised": "classes: 20, mixup: 0.0, cutmix: 0.0",
    "swav": "dim: 12, hidden: 16, prototypes: 20, queue: 40, queue_start: 0.1, freeze_prototypes: 1",
    "vicreg": "dim: 12, hidden: 16",
}
VIEWS = dict.fromkeys(("dino", "esvit", "selfpatch", "swav"), CROPS)
VIEWS |= dict.fromkeys(("drloc", "supervised"), "[{size: 16, count: 2, scale: [0.3, 1.0]}]")
VIEWS |= {"instdisc": "[{size: 16, scale: [0.3, 1.0]}]"}


def small_recipe(method: str) -> str:
    """The text of a recipe of a method that trains in seconds."""
    text = SMALL.replace(
        "method: {name: mocov3, dim: 16, hidden: 32}", f"method: {{name: {method}, {METHODS[method]}}}"
    )
    return text.replace(f"views: [{PAIR}]", f"views: {VIEWS[method]}") if method in VIEWS else text


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A recipe that trains in seconds: 10 steps an epoch on `shards`."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def small_dino(tmp_path: Path) -> Path:
    """The same with DINO, drop path and two crop sizes."""
    path = tmp_path / "small_dino.yaml"
    path.write_text(
        SMALL.replace("name: mocov3, dim: 16, hidden: 32", "name: dino, prototypes: 64, hidden: 32, bottleneck: 16")
        .replace("backbone: {", "backbone: {drop_path: 0.2, ")
        .replace("blur: 0.5}]", "blur: 0.5}, {size: 8, count: 2, scale: [0.1, 0.4]}]")
    )
    return path


class Table:
    """Numbers by method and column, printed when all tests are through."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, float]] = {}

    def add(self, row: str, column: str, value: float) -> None:
        self.cells.setdefault(row, {})[column] = value

    def lines(self) -> list[str]:
        columns = sorted({c for cells in self.cells.values() for c in cells})
        width = max(map(len, self.cells), default=0)
        head = " " * width + "".join(f"  {c}" for c in columns)
        rows = [
            f"{row:<{width}}"
            + "".join(f"  {cells[c]:>{len(c)}.1e}" if c in cells else " " * (len(c) + 2) for c in columns)
            for row, cells in sorted(self.cells.items())
        ]
        return [head, *rows]


TABLE = Table()


@pytest.fixture(scope="session")
def table() -> Table:
    return TABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TABLE.cells:
        terminalreporter.section("relative difference of the gradient from that of one process and the whole batch")
        terminalreporter.write_line("\n".join(TABLE.lines()))
