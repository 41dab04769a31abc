"""Run or continue the sweeps of the papers' claims, and write docs/proof.md from their results.

    python benchmarks/proof.py --hours H [--only SWEEP ...] [--programs N] [--keys KEY=VALUE ...]
    python benchmarks/proof.py --page

`--hours H` trains for so long, the claims that decide most per hour first, one trial at a time on one thread, by
`eagleray tune`. With `--programs N` trials of all claims run side by side instead, N at a time, each as a program of
its own with `--keys` over its recipe, so that Ray is not needed and one GPU is shared; trials whose numbers are stored
are not run again, even on another machine, unless other trials start from their weights. Every trial that has ended is
a line of benchmarks/results/proof.jsonl. Ctrl-C or SIGTERM ends all trials with a checkpoint, stores those that have
ended and exits with 130; the same command continues. `--page` writes the page and its plots alone.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import common
from proof_claims import CLAIMS, JUMP, KNN, PROTOCOLS, RUNS, TOP1, Claim, Pair, command
from proof_page import write

from eagleray import config
from eagleray.base import devices
from eagleray.base.console import stop_on_signal
from eagleray.base.errors import UserError
from eagleray.base.files import read_lines
from eagleray.sweeps.study import Study, begin
from eagleray.sweeps.sweep import Sweep, count_trials, load, recipe_of, suggest

RESULTS = common.ROOT / "benchmarks" / "results" / "proof.jsonl"
OF_SEED = re.compile(r"_s\d$")  # the end of an alternative that is for one seed alone, which has a start of its own
WARM = 30  # steps before a jump of the gradient counts
HISTORY = 100  # steps whose median a gradient norm is compared with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, help="time to train")
    parser.add_argument("--only", nargs="+", metavar="SWEEP", help="names of sweeps; all by default")
    parser.add_argument("--page", action="store_true", help="train nothing: write the page from the results")
    parser.add_argument("--programs", type=int, default=0, metavar="N", help="trials at a time, without Ray")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY=VALUE", help="of every recipe, with --programs")
    args = parser.parse_args()
    chosen = choose(args.only)
    if not args.page and (args.hours is None or args.hours <= 0):
        raise UserError(f"--hours {args.hours}: expected a time above 0, or --page")
    clock, failed = Clock(3600 * (args.hours or 0)), list[str]()
    with clock.ended_by_signals():
        if args.programs and not args.page:
            failed += Programs(chosen, clock, args.keys).run(args.programs)
        elif not args.page:
            for claim in chosen:
                failed += train(claim, clock)
                for trial, _ in finished(claim):
                    failed += evaluate(claim, trial, clock)
    for claim in chosen:
        store(claim)
    write(read_lines(RESULTS))
    if clock.stopped:
        sys.exit(130)
    if failed:
        raise UserError(f"ended early: {', '.join(failed)}; their own lines above say why")


class Clock:
    """The time that is left to train, which a signal ends."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.stopped = False

    def ended_by_signals(self) -> AbstractContextManager[None]:
        """Return a context in which SIGTERM and Ctrl-C end the time."""
        return stop_on_signal(self._stop, "stopping: every trial saves a checkpoint")

    def _stop(self) -> None:
        self.stopped = True

    def left(self) -> float:
        """Return the seconds that are left."""
        return 0.0 if self.stopped else max(0.0, self.end - time.monotonic())


def choose(names: Sequence[str] | None) -> list[Claim]:
    """Return the claims of these sweeps, in the order of their worth. Raises UserError."""
    known = [claim.sweep for claim in CLAIMS]
    for name in names or ():
        if name not in known:
            raise UserError(f"--only {name}: expected one of {', '.join(known)}")
    return [claim for claim in CLAIMS if names is None or claim.sweep in names]


def train(claim: Claim, clock: Clock) -> list[str]:
    """Run or continue the sweep of a claim in the time that is left. Returns what failed, in words."""
    if not clock.left():
        return []
    common.note(command(claim))
    words = [*command(claim).split()[1:], f"sweep.hours={clock.left() / 3600:.4f}"]
    status = eagleray(*words, until=lambda: clock.stopped)
    return [f"{claim.sweep} with status {status}"] if status and not clock.stopped else []


def eagleray(*words: str, until: Callable[[], bool]) -> int:
    """Run a command on one thread, ask it to end once `until` holds, and return its exit status."""
    environment = os.environ | {"PYTHONPATH": str(common.ROOT / "platform"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "eagleray.cli", *words], env=environment) as process:
        while not until():
            try:
                return process.wait(1)
            except subprocess.TimeoutExpired:
                pass
        process.terminate()  # it saves a checkpoint
        return process.wait()


class Programs:
    """Runs trials of claims side by side, each as a program of its own, in the folders of `eagleray tune`."""

    def __init__(self, claims: Sequence[Claim], clock: Clock, keys: Sequence[str]) -> None:
        self.claims, self.clock, self.keys = claims, clock, keys
        self.waiting: dict[str, list[Future[bool]]] = {}  # the trials of a claim; whether each has ended
        self.failed: list[str] = []
        needed = {claim.after for claim in CLAIMS}
        self.known = {(r["claim"], r["setting"], r["seed"]) for r in read_lines(RESULTS) if r["claim"] not in needed}

    def run(self, programs: int) -> list[str]:
        """Run or continue all trials, so many at a time, until the end. Returns what failed, in words. Raises
        UserError."""
        if programs < 1:
            raise UserError(f"--programs {programs}: expected 1 or more")
        begun: list[tuple[Claim, Future[Any]]] = []
        with ThreadPoolExecutor(programs) as pool:
            for claim in self.claims:
                study = Study(load(claim.sweep, [f"out={RUNS}/{claim.sweep}"]), str((RUNS / claim.sweep).absolute()))
                study.folder.mkdir(parents=True, exist_ok=True)
                begin(study)
                study.wait_again()
                for trial, _ in finished(claim):  # perhaps it was stopped before its protocols were applied
                    begun.append((claim, pool.submit(self._evaluate, claim, trial)))
                trials = range(study.open_trials())
                self.waiting[claim.sweep] = [pool.submit(self._next, claim, study) for _ in trials]
                begun += [(claim, future) for future in self.waiting[claim.sweep]]
        for claim, future in begun:
            if isinstance(error := future.exception(), UserError | OSError):
                self.failed.append(f"{claim.sweep}: {error}")
            elif error:
                raise error  # a defect: its traceback is wanted
        return self.failed

    def _next(self, claim: Claim, study: Study) -> bool:
        """Run the next trial of a sweep, if all those that it may start from have ended, and apply the claim's
        protocols. Returns whether the trial has ended."""
        first, _ = wait(self.waiting.get(claim.after, ()))
        if any(f.exception() or not f.result() for f in first) or not self.clock.left() or not (row := study.next()):
            return False
        if (claim.sweep, setting(row), row["values"].get("seed")) in self.known:
            study.set(row["id"], state="stopped")
            return True
        recipe = recipe_of(study.sweep, row["alternative"], row["values"], f"trial {row['id']}")
        file, out = study.folder / f"{row['id']}.yaml", study.trial(row["id"])
        file.write_text(config.dump(recipe))
        status = eagleray("pretrain", str(file), f"out={out}", *self.keys, until=lambda: not self.clock.left())
        if status == 0 and Path(out, "summary.json").exists():
            study.set(row["id"], state="finished", **reached(Path(out), study.sweep.objective.key))
            self._evaluate(claim, Path(out))
            return True
        study.set(row["id"], state="waiting")
        if self.clock.left():
            self.failed.append(f"{claim.sweep} {row['id']} with status {status}")
        return False

    def _evaluate(self, claim: Claim, trial: Path) -> None:
        """Apply the claim's protocols to a trial that has ended, unless no time is left."""
        if self.clock.left():
            self.failed += evaluate(claim, trial, self.clock)


def reached(trial: Path, objective: str) -> dict[str, Any]:
    """Return what the row of a trial that has ended says of it."""
    summary = json.loads((trial / "summary.json").read_text())
    last = read_lines(trial / "metrics.jsonl")[-1]
    steps, metric = summary["steps"], (last | summary).get(objective)
    return {"step": steps, "steps": steps, "metric": metric, "seconds": summary["wall_seconds"]}


def evaluate(claim: Claim, trial: Path, clock: Clock) -> list[str]:
    """Apply the protocols of a claim to a trial that has ended, where it has no such numbers yet, unless a signal
    ends it. Returns what failed, in words."""
    results, failed = trial / "results.json", list[str]()
    for protocol in claim.protocols:
        if results.exists() and any(r["protocol"] == protocol for r in json.loads(results.read_text())):
            continue
        words = ["evaluate", str(trial), "--protocol", protocol, *PROTOCOLS[protocol].split()]
        if clock.stopped:
            break
        if (status := eagleray(*words, until=lambda: clock.stopped)) and not clock.stopped:
            failed.append(f"{protocol} of {claim.sweep} {trial.name} with status {status}")
    return failed


def finished(claim: Claim) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the folders and rows of the trials that took all their steps."""
    folder = RUNS / claim.sweep
    return [(folder / "trials" / r["id"], r) for r in read_lines(folder / "trials.jsonl") if r["state"] == "finished"]


def setting(row: Mapping[str, Any]) -> str:
    """Return the name of a trial's setting: its alternative and its values, without the seed."""
    parts = {k.removesuffix(".value").rpartition(".")[2]: v for k, v in row["values"].items() if k != "seed"}
    alternative = OF_SEED.sub("", row["alternative"])
    return " ".join(filter(None, [alternative, *(f"{k}={v}" for k, v in parts.items())]))


def differing(sweep: Sweep, pair: Pair) -> set[str]:
    """Return the keys in which the recipes of two settings differ in the same seed, but for what they start from."""
    trees: dict[str, dict[str, Any]] = {}
    for number in range(count_trials(sweep)):
        alternative, values = suggest(sweep, number, [])
        if values["seed"] == 0:
            name = setting({"alternative": alternative, "values": values})
            trees[name] = config.flatten(config.to_plain(recipe_of(sweep, alternative, values, name)))
    one, other = trees[pair.better], trees[pair.worse]
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def jump(trial: Path) -> float:
    """Return the largest gradient norm of a run over the median of the steps before it."""
    norms = [r["grad_norm"] for r in read_lines(trial / "steps.jsonl")]
    return max(norms[i] / statistics.median(norms[max(0, i - HISTORY) : i]) for i in range(WARM, len(norms)))


def store(claim: Claim) -> None:
    """Put the trials of a claim that have ended into the results, each once, as soon as they have a number."""
    lines = {(r["claim"], r["setting"], r["seed"]): r for r in read_lines(RESULTS)}
    wanted, gpu = {p.metric for p in (*claim.pairs, *claim.beside)} | {KNN, TOP1}, next(iter(devices.names()), None)
    for trial, row in finished(claim):
        numbers = json.loads((trial / "summary.json").read_text())
        if (trial / "results.json").exists():
            for result in json.loads((trial / "results.json").read_text()):
                numbers |= {} if result["untrained"] else result["numbers"]
        if JUMP in wanted:
            numbers[JUMP] = jump(trial)
        kept = {k: round(numbers[k], 4) for k in sorted(wanted) if k in numbers}
        name, seed = setting(row), row["values"]["seed"]
        line = {"claim": claim.sweep, "setting": name, "seed": seed, "numbers": kept}
        if kept:
            lines[claim.sweep, name, seed] = line | ({"device": gpu} if gpu else {})
    RESULTS.write_text("".join(json.dumps(r) + "\n" for r in lines.values()))


if __name__ == "__main__":
    common.run(main)
