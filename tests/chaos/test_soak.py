"""A run that is disturbed at random for as long as HOURS says, two minutes without it: `make soak HOURS=1`."""

import json
import os
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from chaos.check import verify
from chaos.job import Job, Run
from chaos.site import READERS, Site, outage, uninterrupted
from helpers.s3.proxy import Faults, Proxy

HOURS = float(os.environ.get("HOURS") or 1 / 30)
pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(7200 * HOURS + 900)]
KEYS = ["optim.epochs=1000000", "checkpoint.steps=25", "log_steps=50", "monitor.every=500"]
WARM = 15.0  # seconds after its first step in which a process allocates and opens what it needs
MORE = {"megabytes": 150, "descriptors": 24, "threads": 12}  # a process may have after that, at most
FILES = 40  # that a run may have more than at its first reading, but for a line that each start leaves


@dataclass
class Soak:
    """The run, what has been done to it, and what its processes held, by their numbers."""

    site: Site
    run: Run
    proxy: Proxy
    rng: random.Random

    def __post_init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.begun: dict[int, float] = {}  # when a process was first seen to have taken a step
        self.held: dict[int, list[dict[str, float]]] = defaultdict(list)
        self.files: list[int] = []
        self.starts = self.early = 0  # and how many of the starts were killed before they could take a step
        self.start()

    def start(self) -> None:
        if self.starts:
            self.early += not self.job.took_steps()
        self.job: Job = self.run.start(*READERS[self.starts % len(READERS)], *KEYS)
        self.starts += 1
        self.dying = False

    def look(self) -> None:
        """Note what the processes that train hold; begin again when the command has ended as it may."""
        if (status := self.job.process.poll()) is not None:
            assert self.dying, f"ended with {status}, and nothing was killed: {self.job.said()}"
            self.job.kill_all()
            self.start()
            return
        for pid in self.job.ranks() or [self.job.process.pid]:
            if not (self.run.tracing / f"rank-{pid}.jsonl").exists():
                continue
            try:
                process = psutil.Process(pid)
                age = time.monotonic() - self.begun.setdefault(pid, time.monotonic())
                seen = {"megabytes": process.memory_info().rss / 2**20, "descriptors": process.num_fds()}
                self.held[pid].append({"age": age, **seen, "threads": process.num_threads()})
            except psutil.NoSuchProcess:
                continue
        self.files.append(sum(len(names) for _, _, names in os.walk(self.run.out)))

    def harm(self) -> None:
        """Do one thing, most of which a process survives."""
        kind = self.rng.choice([*PASSING * 3, *DEADLY])
        DEED[kind](self)
        self.done[kind] += 1

    def servers(self) -> None:
        outage(self.site, self.rng.uniform(1, 4), self.rng.choice(["object", "proxy", "container"]))

    def pause(self) -> None:
        self.site.swift("pause", "all")
        time.sleep(self.rng.uniform(1, 5))
        self.site.swift("resume", "all")

    def network(self) -> None:
        share = self.rng.uniform(0.05, 0.4)
        self.proxy.faults = Faults(**{self.rng.choice(["refuse", "cut", "reset"]): share})
        time.sleep(self.rng.uniform(2, 6))
        self.proxy.faults = Faults()

    def stop_loader(self) -> None:
        """A loader process stands still for a while."""
        if loaders := self.job.loader_workers():
            pid = self.rng.choice(loaders)
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.rng.uniform(1, 4))
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return

    def kill_rank(self) -> None:
        self.kill_one_of(self.job.ranks())

    def kill_ray_worker(self) -> None:
        self.kill_one_of(self.job.ray_workers())

    def kill_loader(self) -> None:
        self.kill_one_of(self.job.loader_workers())

    def kill_one_of(self, pids: list[int]) -> None:
        self.dying = self.dying or not self.job.ray_workers()  # with them all ranks begin again
        if pids:
            self.job.kill(self.rng.choice(pids))

    def kill_job(self) -> None:
        self.job.kill_all()
        self.start()

    def ask_to_stop(self) -> None:
        self.dying = True
        self.job.process.terminate()


PASSING = ["servers", "pause", "network", "stop_loader"]
DEADLY = ["kill_rank", "kill_ray_worker", "kill_loader", "kill_job", "ask_to_stop"]
DEED: dict[str, Callable[[Soak], None]] = {name: getattr(Soak, name) for name in PASSING + DEADLY}


def test_a_run_that_is_disturbed_for_hours(
    site: Site, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(site.recipe, site.upload("soak"), tmp_path / "run") as run:
        soak = Soak(site, run, proxy, random.Random(int(os.environ.get("SEED") or 0)))
        end = time.monotonic() + 3600 * HOURS
        while (left := end - time.monotonic()) > 0:
            for _ in range(soak.rng.randint(2, 10)):
                time.sleep(1)
                soak.look()
            soak.harm()
            with capsys.disabled():
                print(f"\r{left / 60:6.1f} min left, {soak.starts} starts, {dict(soak.done)}", end="  ", flush=True)
        soak.job.kill_all()
        last = run.last()
        story = {"hours": HOURS, "steps": last, "starts": soak.starts, "faults": dict(soak.done), **grown(soak)}
        with capsys.disabled():
            print(f"\n{json.dumps(story)}")
        assert last > 100
        assert set(soak.done) >= set(PASSING) or HOURS < 0.1
        verify([line for line in run.lines() if line.step <= last], uninterrupted(run, last, KEYS), last)
        for name, limit in MORE.items():
            assert story[name][1] <= limit, f"a process went on taking {name}: {story}"
        assert max(soak.files) - soak.files[0] <= FILES + 4 * soak.starts, story
        assert not (run.out / "quarantine.jsonl").exists()
        attempts = {line.attempt for line in run.lines()}
        assert len(attempts) >= soak.starts - soak.early - 1, "every start that was given the time took steps"


def grown(soak: Soak) -> dict[str, list[float]]:
    """By kind: what a process held in the middle of the readings, and the most by which one grew since it was warm."""
    grown = {}
    for name in MORE:
        rows = [[r[name] for r in held if r["age"] > WARM] for held in soak.held.values()]
        rows = [row for row in rows if len(row) > 1]
        if rows:
            grown[name] = [round(statistics.median(map(statistics.median, rows)), 1), max(r[-1] - r[0] for r in rows)]
        else:
            grown[name] = [0.0, 0.0]
    return grown
