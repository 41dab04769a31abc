"""Every benchmark at its own sizes, in the environment that it makes for its rivals, for the first minute.

Those of `ratios.py` run there to their end, and those of a set that is prepared first by `proof_set.py` have tests of
their own with tiny sizes.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.benchmarks import BENCHMARKS, ROOT, load_benchmark

from eagleray.cli.demo import pictures
from eagleray.datasets.shards import write_shards

SECONDS = 60
COMMANDS = [
    "backbones.py",
    "big_index.py",
    "checkpoint_stall.py",
    "continued.py --data DATA --out OUT",
    "control_cost.py",
    "crops.py --images 8 --rounds 1",
    "curation.py --data DATA --out OUT",
    "curation_size.py",
    "decode.py --dali",
    "dispatch.py",
    "drloc_cost.py",
    "embed.py",
    "evaluate_scale.py",
    "evidence.py --data DATA/cifar10 --work OUT",
    "faults.py",
    "in_place.py",
    "kernels.py prototypes windows --share 0.1",
    "lambda_search.py untrained:timm:resnet18 DATA/cifar10",
    "loader_memory.py --figure OUT.png",
    "methods.py",
    "monitors.py",
    "peers.py",
    "photometric.py",
    "plan.py",
    "region_cost.py",
    "resume.py",
    "step.py --synthetic optim.batch=8 data.lanes=8",
    "stores.py",
    "trust_cost.py --before HEAD",
]
ELSEWHERE = {"lejepa.py", "proof.py", "published.py"}  # they go on for hours
ELSEWHERE |= {"ratios.py", "head_memory.py", "fault_times.py", "many_ranks.py"}
PARTS = {
    "peers_lightly_train.py",
    "plain_step.py",
    "proof_set.py",
    "rival_datasets.py",
    "rivals.py",
    "synthetic.py",
    "table.py",
}
PARTS |= {"trust_cost_parts.py"}  # programs that another benchmark runs


def test_no_benchmark_is_left_out() -> None:
    programs = {file.name for file in BENCHMARKS.glob("*.py") if "__main__" in file.read_text()}
    of_ratios = {command[0] for command, _ in load_benchmark("ratios.py")["PARTS"].values()}
    named = {command.split()[0] for command in COMMANDS}
    assert named | of_ratios | ELSEWHERE | PARTS == programs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cifar10/ and transfer/mnist/, which are drawn pictures."""
    folder = tmp_path_factory.mktemp("data")
    for seed, (split, count) in enumerate((("train", 2000), ("test", 400))):
        write_shards(pictures(seed, count), str(folder / split))
    for name in ("cifar10", "transfer/mnist"):
        (folder / name).mkdir(parents=True)
        for file in folder.glob("t*/*.tar"):
            (folder / name / file.name.replace("shard", file.parent.name)).symlink_to(file)
    return folder


def changed() -> str:
    return subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", COMMANDS)
def test_first_minute(command: str, data: Path, tmp_path: Path) -> None:
    """The checkout stays as it was: results are kept by who asks for it, and `make test-all` goes on by the tree."""
    before = changed()
    program, *words = command.replace("DATA", str(data)).replace("OUT", str(tmp_path / "out")).split()
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, BENCHMARKS / program, *words],
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        said = log.read()
    assert status == 0, said
    assert changed() == before
    assert not re.search(r"^(Traceback|error: )", said, re.M), said
