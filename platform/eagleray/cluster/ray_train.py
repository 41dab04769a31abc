"""Run pretraining on Ray Train: worker processes, restarts, and errors that reach the user.

On a cluster, the head runs these functions for all submitted runs. To save its memory, only workers import PyTorch."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from eagleray import config
from eagleray.base.console import say
from eagleray.base.errors import Outage, UserError, one_line
from eagleray.base.threads import begin
from eagleray.cluster.controller import Controller
from eagleray.cluster.failure import failure_of
from eagleray.cluster.prometheus import wanted
from eagleray.cluster.reservation import Reservation
from eagleray.cluster.resize import save_before_resize
from eagleray.cluster.session import divert_stderr, machines, session
from eagleray.cluster.spares import HANGING
from eagleray.cluster.waiting import Say, Waiting
from eagleray.config import plugins
from eagleray.config.types import NO_FP16
from eagleray.runs import layout
from eagleray.runs.recipe import Recipe
from eagleray.runs.run_store import run_store
from eagleray.runs.stop_request import notes_of
from eagleray.runs.tracking import Tracking

# Seconds between two checks for room for more workers: a run on a cluster that grows by a node every few seconds still
# spends most of its time training.
RESIZE = 60.0
FINEST = 10_000  # Ray's resolution of resources: parts per CPU


def launch(recipe: Recipe, *, tracking: Tracking, command: str) -> dict[str, Any] | None:
    """Train on `recipe.workers` Ray workers, on the cluster at RAY_ADDRESS or, without it, on a local Ray.

    Returns the summary, or None when the run was asked to stop. Raises UserError for what the user can correct, Outage
    when a store does not answer, and RuntimeError for any other failure of the run."""
    run = run_store(recipe.out)
    log = run.view / layout.RAY_LOG
    try:
        with divert_stderr(log), session() as ray:
            return fit(ray, recipe, tracking=tracking, command=command, say=say)
    finally:
        if log.exists():
            with contextlib.suppress(UserError, Outage):  # an error here must not hide the run's own
                run.share(log)


def fit(
    ray: Any,
    recipe: Recipe,
    *,
    tracking: Tracking,
    command: str,
    callbacks: Sequence[Any] = (),
    say: Say = lambda line: None,
) -> dict[str, Any] | None:
    """Train in a Ray that is already connected. `callbacks` are passed to Ray Train, and `say` gets a line while the
    run waits for resources. Returns and raises the same as `launch`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from eagleray.cluster import process_group

    least, most = recipe.ranks
    # Seconds that Ray waits for all workers before it starts, if the recipe allows that, with fewer.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "120" if least == most else "30")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # seconds until a dead worker is noticed
    os.environ.setdefault("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S", f"{HANGING:.0f}")
    gpu, cpus = resources(recipe, machines(ray))
    if gpu:
        process_group.watch_hangs(recipe.data.patience)
    elif recipe.precision == "fp16":
        raise UserError(NO_FP16)  # raised here, as the same error in a worker would come later
    each = {"CPU": cpus} | ({"GPU": 1.0} if gpu else {})
    reservation = Reservation(ray, recipe.out)
    controller = Controller(reservation.name)
    of_others = (reservation.amounts, reservation.release_dead) if least < most else ()
    waiting = Waiting(ray, least, most, each, say, *of_others)
    began = time.time()
    trainer = DataParallelTrainer(
        work,
        train_loop_config={
            "recipe": config.to_plain(recipe),
            "plugins": plugins.pack(recipe.plugins),
            "tracking": tracking,  # an object, as Ray records plain values, and its URL may have a password
            "cpus": cpus,
            "timeout": process_group.limit(recipe.data.patience),
            "command": command,
        },
        backend_config=process_group.Ranks(),
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most),  # type: ignore[arg-type]
            use_gpu=gpu,
            resources_per_worker=each,
            elastic_resize_monitor_interval_s=RESIZE,  # type: ignore[call-arg]
        ),
        run_config=RunConfig(
            name=f"train-{began:.3f}",
            storage_path=str(run_store(recipe.out).view / ".ray"),
            # Ray restarts without limit; `RunDir.begin` and `failure.count` end a run that makes no progress.
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[*callbacks, save_before_resize(), controller.callback()],
        ),
    )
    reservation.give_name(trainer)
    try:
        with wanted(recipe.out, recipe.method.name, tracking.user, least):
            stopped = stop_asked(recipe.out, command, 60 * recipe.data.patience)
            result = _fit(trainer, waiting, stopped, lambda: None if waiting.asks() else controller.kill())
    finally:
        reservation.cancel()
        controller.forget()
    return None if result is None else _summary(result, recipe.out, command)


def _summary(result: Any, out: str, command: str) -> Any:
    """Return rank 0's summary from Ray's `result`. Raises the stored failure of the command's run, or Ray's error."""
    raise_failure(out, command)
    if isinstance(result, BaseException):
        os.write(2, f"{result}\n".encode())  # may be dozens of lines, such as the memory of each process
        where = f"see {layout.LOG} and {layout.RAY_LOG} in {out}"
        raise RuntimeError(f"Ray Train failed: {one_line(result)}; {where}") from result
    return result.return_value


def work(given: dict[str, Any]) -> Any:
    """Train one rank, in a worker of Ray Train."""
    from eagleray.cluster.supervisor import supervise

    return supervise(given)


def stop_asked(out: str, command: str, patience: float) -> Callable[[], bool]:
    """Return a function that says whether a person or the command itself has asked the command's run to stop. While the
    store does not answer, it returns False; after `patience` seconds of that it raises Outage."""
    run, away = run_store(out), None  # `away`: time.monotonic() when the store stopped answering

    def look() -> bool:
        nonlocal away
        try:
            asked = any(run.get(name) is not None for name in notes_of(command))
        except Outage:
            away = away or time.monotonic()
            if time.monotonic() - away > patience:
                raise
            return False
        away = None
        return asked

    return look


def raise_failure(out: str, command: str) -> None:
    """Raise the stored error with which a command's run has failed for good, if there is one.

    Its traceback is added to the run's log if it is missing there, as a remote run has the log of rank 0 only."""
    failure = failure_of(out, command)
    if failure is None:
        return
    if trace := failure.get("trace", "").strip():
        with contextlib.suppress(UserError, Outage, OSError):
            log = (run := run_store(out)).fetch() / layout.LOG
            if not log.exists() or trace.rpartition("\n")[2] not in log.read_text(errors="replace"):
                run.append(layout.LOG, failure["trace"])
    raise (UserError if failure["user"] else Outage if failure.get("outage") else RuntimeError)(failure["why"])


def resources(recipe: Recipe, nodes: Sequence[Mapping[str, float]]) -> tuple[bool, float]:
    """Return whether each worker gets a GPU, as the recipe or the cluster says, and its number of CPUs. Raises
    UserError when the recipe does not set `gpus`, and `nodes` have some GPUs but too few, or neither GPUs nor CPUs."""
    least, most = recipe.ranks
    gpus = sum(n.get("GPU", 0) for n in nodes)
    if recipe.gpus is None and 0 < gpus < least:
        raise UserError(
            f"workers={recipe.workers}: there are {gpus:g} GPUs, and each worker needs one; gpus=true waits for more, "
            "gpus=false trains on CPUs"
        )
    if recipe.gpus is None and not any(n.get("CPU", 0) or n.get("GPU", 0) for n in nodes):
        raise UserError(
            f"workers={recipe.workers}: the cluster has no machine with CPUs or GPUs yet; gpus=true waits for GPUs, "
            "gpus=false for CPUs"
        )
    gpu = gpus >= least if recipe.gpus is None else recipe.gpus
    # The CPUs of a worker on each machine; the lowest counts. Machines such as a head have neither CPUs nor GPUs.
    if gpu:
        shares = [n.get("CPU", 1) / n["GPU"] for n in nodes if n.get("GPU")]
    else:
        shares = [n["CPU"] for n in nodes if n.get("CPU")]  # and the largest share with which all workers have room
        shares += sorted((c / k for c in shares for k in range(1, most + 1)), reverse=True)[most - 1 : most]
    each = max(math.floor(FINEST * min(shares, default=1) + 1e-6), 1) / FINEST
    whole = each >= 1 or gpu or least < most  # elastic runs need whole CPUs
    return gpu, max(int(each), 1) if whole else each


def _fit(trainer: Any, waiting: Waiting, stopped: Callable[[], bool], abort: Callable[[], object]) -> Any:
    """Run the trainer, and return Ray's result or the error. The trainer has a thread of its own, as in the main thread
    Ray would handle Ctrl-C itself, but the run has to save first. `waiting` prints what the run waits for. If it is
    stopped while it waits, no worker can see that: then calls `abort`, which ends the trainer, and returns None."""
    result = begin(trainer.fit, "ray-train")
    while not result.done():
        wait([result], 0.2)
        if waiting.look() and stopped():
            waiting.say("stopped while it waited; the same command continues")
            abort()
            return None
    return result.exception() or result.result()
