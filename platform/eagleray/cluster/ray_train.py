"""A run on Ray Train: worker processes, restarts, and the way back for what the user must know."""

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import torch

from eagleray import checkpoint, config, dist, run
from eagleray.cluster.session import session
from eagleray.cluster.world import World
from eagleray.errors import Outage, UserError
from eagleray.recipe import Recipe
from eagleray.track import read_lines

RETRIES = 16  # restarts of the workers before the command fails; the same command continues even then


def launch(recipe: Recipe, *, tracking: str) -> dict[str, Any] | None:
    """Run on `recipe.workers` Ray workers; on the cluster of RAY_ADDRESS where that is set, else on one of our own.

    Returns the summary, or None when the run was asked to stop. Raises UserError.
    """
    with session() as ray:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        cpus, gpus = ray.cluster_resources().get("CPU", 1), ray.cluster_resources().get("GPU", 0)
        if 0 < gpus < recipe.workers:
            raise UserError(f"workers={recipe.workers}: there are {gpus:g} GPUs, and each worker needs one")
        smallest = min(n["Resources"].get("CPU", 1) for n in ray.nodes() if n["Alive"])
        each = math.floor(100 * min(cpus / recipe.workers, smallest)) / 100
        out = Path(recipe.out or "")
        for old in (".failure", ".failures.jsonl"):
            (out / old).unlink(missing_ok=True)
        trainer = TorchTrainer(
            _rank,  # type: ignore[arg-type]
            train_loop_config={
                "recipe": config.plain(recipe),
                "tracking": tracking,
                "threads": max(int(each), 1),
            },
            scaling_config=ScalingConfig(
                num_workers=recipe.workers,
                use_gpu=gpus >= recipe.workers,
                resources_per_worker={"CPU": max(int(each), 1) if each >= 1 else each},
            ),
            run_config=RunConfig(
                name=f"train-{time.time():.0f}",
                storage_path=str(out / ".ray"),
                failure_config=FailureConfig(max_failures=RETRIES),
            ),
        )
        return _fit(trainer, out)


def _fit(trainer: Any, out: Path) -> dict[str, Any] | None:
    """In a thread of its own: in the main thread Ray would take Ctrl-C, and we want to save first."""
    box: dict[str, Any] = {}

    def work() -> None:
        try:
            box["result"] = trainer.fit()
        except BaseException as e:
            box["error"] = e

    thread = threading.Thread(target=work, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    failure = out / ".failure"
    if failure.exists():
        told = json.loads(failure.read_text())
        raise (UserError if told["user"] else RuntimeError)(told["why"])
    if "error" in box:
        raise RuntimeError(f"Ray gave up: {box['error']}; {out / 'train.log'} says why") from box["error"]
    return box["result"].return_value  # type: ignore[no-any-return]


def _rank(given: dict[str, Any]) -> dict[str, Any] | None:
    """What every worker runs. Ray restarts all workers when one fails; what no restart can mend is left in `.failure`,
    where the restarted workers and the command find it."""
    from ray.train.torch import get_device

    recipe = config.check(Recipe, given["recipe"], "recipe")
    failure = Path(recipe.out or "") / ".failure"
    if failure.exists():
        return None
    device = get_device()
    if device.type == "cpu":
        torch.set_num_threads(given["threads"])
    try:
        return run.pretrain(recipe, World(device), tracking=given["tracking"])
    except (UserError, Outage) as e:
        failure.write_text(json.dumps({"user": isinstance(e, UserError), "why": str(e)}))
        raise
    except Exception as e:
        _count(failure, e)
        raise


def _count(failure: Path, error: Exception) -> None:
    """Give up on an error that came back twice, since this command began, without a new checkpoint in between."""
    path = failure.with_name(".failures.jsonl")
    newest = [m.stem for m in checkpoint.manifests(failure.parent / "checkpoints")[:1]]
    with path.open("a") as f:
        f.write(json.dumps({"after": newest, "rank": dist.rank()}) + "\n")
    mine = [f["after"] for f in read_lines(path) if f["rank"] == dist.rank()]
    if mine[-3:] == [newest] * 3:
        why = (
            f"failed three times without progress: {type(error).__name__}: {error}; see {failure.parent / 'train.log'}"
        )
        failure.write_text(json.dumps({"user": False, "why": why}))
