"""Benchmarks as modules, for tests of their parts, and as programs on a machine that has little else."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ABSENT = ("ray", "mlflow", "boto3", "webdataset", "typer", "rich")
# Some packages cannot be imported, and ours is not installed.
LACKS = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.path[:] = [p for p in sys.path if not p.endswith("/platform")]
"""
# Imports what takes seconds, then is copied for each program.
COPIED = """
import json, os, runpy, sys
import timm, torch, torchvision
for line in sys.stdin:
    words, *files = json.loads(line)
    if not (process := os.fork()):
        for number, name in enumerate(files, 1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
sys.stdin, sys.argv, sys.path[0] = open(os.devnull), words, os.path.dirname(words[0])
runpy.run_path(words[0], run_name="__main__")
"""


class Bare:
    """A machine without a GPU that has a copy of the repository and little else. Its programs begin at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(LACKS)
        given = {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | given
        self.process: subprocess.Popen[str] | None = None

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program of Python with arguments."""
        if not self.process:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COPIED],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin
        assert self.process.stdout
        files = self.folder / "out", self.folder / "err"
        print(json.dumps([[*map(str, words)], *map(str, files)]), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))

    def close(self) -> None:
        if self.process:
            self.process.communicate()


def load_benchmark(name: str) -> dict[str, Any]:
    """Return the globals of a program below benchmarks/, which imports others from there; its `main` does not run."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return runpy.run_path(str(BENCHMARKS / name))
    finally:
        sys.path.remove(str(BENCHMARKS))
