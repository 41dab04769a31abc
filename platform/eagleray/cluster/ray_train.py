"""Run pretraining on Ray Train: worker processes, restarts, and errors that reach the user."""

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagleray import config
from eagleray.base import dist
from eagleray.base.errors import Futile, Outage, Preempted, UserError
from eagleray.cluster.prometheus import Gauges
from eagleray.cluster.session import session
from eagleray.config import plugins
from eagleray.engine import checkpoint
from eagleray.engine.precision import compute_dtype
from eagleray.engine.world import World
from eagleray.runs import layout, pretrain, remote
from eagleray.runs.recipe import Recipe
from eagleray.runs.tracking import Tracking

RESIZE = 20.0  # seconds between two looks whether there is room for more workers


class RayWorld(World):
    """The world of one worker of Ray Train. It learns when a machine will be taken away, and exports metrics."""

    spot = True

    def __init__(self, device: torch.device, name: str, method: str) -> None:
        super().__init__(device)
        self.name, self.method = name, method
        self.gauges: Gauges | None = None

    def warned(self) -> bool:
        """Return whether Ray has announced that a machine of this run will be taken away."""
        from ray.train import get_preemption_info

        return get_preemption_info() is not None

    def show(self, record: Mapping[str, Any], steps: int) -> None:
        """Export the numbers of a record, from rank 0."""
        self.gauges = self.gauges or Gauges(self.name, self.method, steps)
        self.gauges.update(record)


def launch(recipe: Recipe, *, tracking: Tracking) -> dict[str, Any] | None:
    """Train on `recipe.workers` Ray workers, on the cluster of RAY_ADDRESS if that is set, else in a Ray that is
    started on this machine.

    Returns the summary, or None when the run was asked to stop. Raises UserError.
    """
    with session() as ray:
        return fit(ray, recipe, tracking=tracking)


def fit(ray: Any, recipe: Recipe, *, tracking: Tracking, callbacks: Sequence[Any] = ()) -> dict[str, Any] | None:
    """Train in a Ray that is connected already. `callbacks` are passed to Ray Train. Returns and raises the same as
    `launch`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    least, most = recipe.ranks
    # Ray waits so long for workers before it makes do with fewer.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "120" if least == most else "30")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # until a dead worker is noticed
    gpu, cpus = resources(recipe, [n["Resources"] for n in ray.nodes() if n["Alive"]])
    if not gpu:
        compute_dtype(recipe.precision, torch.device("cpu"))  # an error here is one line; a worker's comes later
    began = time.time()
    trainer = TorchTrainer(
        _rank,  # type: ignore[arg-type]
        train_loop_config={
            "recipe": config.to_plain(recipe),
            "plugins": plugins.pack(recipe.plugins),
            "tracking": tracking,  # not in pieces: Ray records them, and the address may hold a password
            "threads": max(int(cpus), 1),
            "command": began,
        },
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most),  # type: ignore[arg-type]
            use_gpu=gpu,
            resources_per_worker={"CPU": cpus} | ({"GPU": 1} if gpu else {}),
            elastic_resize_monitor_interval_s=RESIZE,  # type: ignore[call-arg]
        ),
        run_config=RunConfig(
            name=f"train-{began:.3f}",
            storage_path=str(remote.view_dir(recipe.out) / ".ray"),
            # Whether to go on is decided by what the run has saved since, see `RunDir.begin` and `_count`.
            failure_config=FailureConfig(max_failures=-1),
            callbacks=list(callbacks),
        ),
    )
    result = _fit(trainer)
    if failure := remote.read_note(recipe.out, layout.FAILURE):
        note = json.loads(failure)
        raise (UserError if note["user"] else RuntimeError)(note["why"])
    if isinstance(result, BaseException):
        raise RuntimeError(f"Ray Train failed: {result}; see {recipe.out}/{layout.LOG}") from result
    return result.return_value  # type: ignore[no-any-return]


def resources(recipe: Recipe, nodes: Sequence[Mapping[str, float]]) -> tuple[bool, float]:
    """Return the resources of each worker: a GPU if the recipe or the cluster has GPUs, and a number of CPUs. Raises
    UserError when there are GPUs, but fewer than workers."""
    least, most = recipe.ranks
    gpus = sum(n.get("GPU", 0) for n in nodes)
    if recipe.gpus is None and 0 < gpus < least:
        raise UserError(
            f"workers={recipe.workers}: there are {gpus:g} GPUs, and each worker needs one; gpus=true waits for more, "
            "gpus=false trains on CPUs"
        )
    gpu = gpus >= least if recipe.gpus is None else recipe.gpus
    # What is there per worker, on the machine that has the least of it; machines that only direct have none.
    if gpu:
        shares = [n.get("CPU", 1) / n["GPU"] for n in nodes if n.get("GPU")]
    else:
        with_cpus = [n["CPU"] for n in nodes if n.get("CPU")]
        shares = [*with_cpus, sum(with_cpus) / most]
    each = math.floor(100 * min(shares, default=1)) / 100
    whole = each >= 1 or gpu or least < most  # Ray resizes by whole CPUs
    return gpu, max(int(each), 1) if whole else each


def _fit(trainer: Any) -> Any:
    """Run the trainer in a thread of its own, and return Ray's result or the error: in the main thread Ray would handle
    Ctrl-C itself, but the run has to save first."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(trainer.fit())
        except BaseException as e:
            results.append(e)

    thread = threading.Thread(target=work, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    return results[0]


def _rank(given: dict[str, Any]) -> dict[str, Any] | None:
    """Train one rank; this function runs in every worker. Ray restarts all workers when one fails. An error that a
    restart cannot fix is written to `.failure`, where the restarted workers and the command read it."""
    from ray.train.torch import get_device

    out = given["recipe"]["out"] or ""
    if remote.read_note(out, layout.FAILURE):
        return None
    try:
        plugins.install(given["plugins"])
        recipe = config.check(Recipe, given["recipe"], "recipe")
    except UserError as e:  # such as of a plug-in that imports what this machine has not
        remote.write_note(out, layout.FAILURE, json.dumps({"user": True, "why": str(e)}))
        raise
    device = get_device()
    if device.type == "cpu":
        torch.set_num_threads(given["threads"])
    world = RayWorld(device, out.rpartition("/")[2], recipe.method.name)
    try:
        return pretrain.pretrain(recipe, world, tracking=given["tracking"], command=given["command"])
    except Preempted:
        raise  # the restarted workers sit on other machines
    except (UserError, Outage) as e:
        remote.write_note(out, layout.FAILURE, json.dumps({"user": isinstance(e, UserError), "why": str(e)}))
        raise
    except Exception as e:
        _count(out, given["command"], e)
        raise


def _count(out: str, command: float, error: Exception) -> None:
    """Write `.failure` when an error came back twice since this command started, without a new checkpoint in
    between."""
    newest = checkpoint.manifests(f"{out}/checkpoints")[:1]
    name = f".failures-{dist.rank()}"
    known = json.loads(remote.read_note(out, name) or "{}")
    times = known["times"] + 1 if known.get("after") == newest and known.get("command") == command else 1
    remote.write_note(out, name, json.dumps({"command": command, "after": newest, "times": times}))
    if times == 3 or isinstance(error, Futile):
        why = f"failed {times} times without progress: {type(error).__name__}: {error}; see {out}/train.log"
        remote.write_note(out, layout.FAILURE, json.dumps({"user": False, "why": why}))
