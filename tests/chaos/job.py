"""A run as a user starts it, and the processes it consists of, to be killed one by one or all at once."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from chaos.check import Line, steps, trace

from eagleray.cluster.spares import NAME

TRACING = Path(__file__).parent / "trace"
COMMAND = Path(sys.executable).parent / "eagleray"


@dataclass
class Run:
    """A run's folder, to which any number of commands may lead; none of them outlives the `with`."""

    recipe: Path
    data: str
    out: Path
    jobs: list["Job"] = field(default_factory=list)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            job.kill_all()

    def start(self, workers: int, readers: int, *more: str) -> "Job":
        """The command with so many Ray workers and loader processes in each."""
        settings = [f"data.train={self.data}", f"out={self.out}", f"workers={workers}", f"data.workers={readers}"]
        self.jobs.append(Job(self, [str(self.recipe), *settings, *more]))
        return self.jobs[-1]

    @property
    def tracing(self) -> Path:
        return self.out.with_name(f"{self.out.name}-trace")

    def lines(self) -> list[Line]:
        return trace(self.tracing)

    def last(self) -> int:
        """The last step that was taken by all ranks."""
        return max(steps(self.lines()))

    def weights(self, step: int) -> dict[str, Any]:
        """Of the checkpoint at a step."""
        path = self.out / "checkpoints" / f"step-{step:09d}.pt"
        return torch.load(path, map_location="cpu", weights_only=True)["method"]  # type: ignore[no-any-return]


class Job:
    """`eagleray pretrain`, in a session of its own, with its samples traced."""

    def __init__(self, run: Run, arguments: list[str]) -> None:
        self.run = run
        run.tracing.mkdir(parents=True, exist_ok=True)
        self.past = {line.attempt for line in run.lines()}
        paths = [str(TRACING), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"PYTHONPATH": os.pathsep.join(paths), "EAGLERAY_TRACE": str(run.tracing), "OMP_NUM_THREADS": "1"}
        self.out, self.err = (run.tracing / f"command-{len(run.jobs)}.{name}" for name in ("out", "err"))
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [COMMAND, "pretrain", *arguments],
                stdout=out,
                stderr=err,
                env=os.environ | settings,
                start_new_session=True,
            )

    def wait_for(self, step: int, seconds: float = 900) -> None:
        """Until a rank has been given that step, by this command and since the last time that one was killed."""
        end = time.monotonic() + seconds
        while not any(line.step >= step for line in self.run.lines() if line.attempt not in self.past):
            assert self.process.poll() is None, f"ended before step {step}: {self.said()}"
            assert time.monotonic() < end, f"no step {step} in {seconds:.0f} s: {self.said()}"
            time.sleep(0.05)

    def took_steps(self) -> bool:
        """Whether a rank of this command has been given samples."""
        return any(line.attempt not in self.past for line in self.run.lines())

    def finish(self, seconds: float = 900) -> int:
        """The exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished in {seconds:.0f} s: {self.said()}") from None

    def stop(self) -> None:
        """Ask it to save and stop after this step."""
        self.process.terminate()
        assert self.finish() == 1, self.said()

    def said(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def complaint(self) -> str:
        """The one line that says why it failed; warnings of other packages do not count."""
        text = self.err.read_text()
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, text
        assert "Traceback" not in text, text
        return lines[0]

    def loader_workers(self) -> list[int]:
        return [p for p in self.processes() if _read(p, "comm").startswith("pt_data_worker")]

    def ranks(self) -> list[int]:
        """The processes that train."""
        return sorted(p for p in self.processes() if _read(p, "comm").strip() == NAME)

    def ray_workers(self) -> list[int]:
        """Ray's workers, each of which follows a process that trains."""
        return sorted(p for p in self.processes() if "RayTrainWorker" in _read(p, "cmdline"))

    def processes(self) -> list[int]:
        """All of this command's session, Ray's processes too."""
        mine = []
        for entry in Path("/proc").glob("[0-9]*"):
            fields = _read(int(entry.name), "stat").rpartition(")")[2].split()
            if fields and fields[0] != "Z" and int(fields[3]) == self.process.pid:
                mine.append(int(entry.name))
        return mine

    def kill(self, pid: int) -> None:
        """One process; Ray may begin the ranks again."""
        self.past |= {line.attempt for line in self.run.lines()}
        os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """The whole job; a process that it is just starting is found at the next look."""
        while mine := self.processes():
            for pid in mine:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has gone meanwhile
        return ""
