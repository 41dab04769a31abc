"""Ray's private names that we use. A new Ray may take any of them away, which this test then says by name; until then
pyproject.toml admits no newer one."""

import ast
import importlib
import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COORDINATOR = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
TRAIN = "ray.train.v2._internal.execution."
# The module, the name in it, and what it is needed for.
IMPORTED = {
    ("ray._private.services", ""): "servers of Ray in process groups of their own",
    ("ray._private.state", "state"): "saving a trial before its machine is taken away",
    ("ray._raylet", "PlacementGroupID"): "freeing what a trial that died had reserved",
    ("ray.experimental.internal_kv", "_internal_kv_del"): "maps over shards",
    ("ray.experimental.internal_kv", "_internal_kv_exists"): "maps over shards",
    ("ray.experimental.internal_kv", "_internal_kv_get"): "the error of a run whose store is away, and its controller",
    ("ray.experimental.internal_kv", "_internal_kv_initialized"): "the error of a run whose store is away",
    ("ray.experimental.internal_kv", "_internal_kv_put"): "maps over shards, and that error",
    ("ray.train.torch.config", "_set_torch_distributed_env_vars"): "process groups that end",
    (TRAIN + "callback", "ControllerCallback"): "saving before a resize, and ending what waits for nobody",
    (TRAIN + "callback", "WorkerGroupCallback"): "saving before a resize, and what a trial had reserved",
    (TRAIN + "context", "get_train_context"): "saving before a machine is taken away",
}
# What these give us, and what we replace or override.
COORDINATOR = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
REACHED = [
    (COORDINATOR, "_AutoscalingCoordinatorActor.cancel_request"),
    (COORDINATOR, "_AutoscalingCoordinatorActor.get_reserved_resources"),
    (TRAIN + "context", "TrainRunContext.run_id"),
    ("ray._private.services", "ConsolePopen"),
    ("ray._private.state", "GlobalState.get_draining_nodes"),
    ("ray.job_submission", "JobSubmissionClient._do_request"),
    ("ray.tune.execution.class_cache", "ENV_VARS_TO_PROPAGATE"),
    ("ray.tune.experiment.trial", "Trial.pickled_error_file"),
    (TRAIN + "callback", "ControllerCallback.after_controller_start"),
    (TRAIN + "callback", "ControllerCallback.before_controller_execute_failure_decision"),
    (TRAIN + "callback", "ControllerCallback.before_controller_execute_resize_decision"),
    (TRAIN + "callback", "WorkerGroupCallback.after_worker_group_start"),
    (TRAIN + "callback", "WorkerGroupCallback.after_worker_group_training_start"),
    (TRAIN + "callback", "WorkerGroupCallback.before_worker_group_shutdown"),
    (TRAIN + "context", "TrainContext.preemption_context"),
    (TRAIN + "context", "TrainRunContext.run_id"),
    (TRAIN + "preemption", "PreemptionContext.preemption_info"),
    (TRAIN + "worker_group.worker_group", "WorkerGroup.execute_single_async"),
    (TRAIN + "worker_group.worker_group", "WorkerGroup.get_worker_group_state"),
]


def private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def used() -> set[tuple[str, str]]:
    """What the package takes from Ray's private modules, or by a private name."""
    out = set()
    for path in (ROOT / "platform").rglob("*.py"):
        if "ray" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
                out |= {(node.module or "", a.name) for a in node.names if private(f"{node.module}.{a.name}")}
            elif isinstance(node, ast.Import):
                out |= {(a.name, "") for a in node.names if a.name.startswith("ray.") and private(a.name)}
            elif isinstance(node, ast.Constant) and re.fullmatch(r"ray(\.\w+)+", str(node.value)):
                out |= {(str(node.value), "")} if private(str(node.value)) else set()
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_internal_kv_"):
                out.add(("ray.experimental.internal_kv", node.attr))
    return out


def test_the_private_names_that_we_use_are_known():
    assert used() == set(IMPORTED)


@pytest.mark.parametrize(("module", "name"), [*IMPORTED, *REACHED], ids=lambda text: text)
def test_ray_has_a_private_name_that_we_use(module: str, name: str):
    found = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        fields = getattr(found, "__dataclass_fields__", {})
        assert hasattr(found, part) or part in fields, f"Ray {version('ray')} has no {module}.{name}"
        found = getattr(found, part, None)  # a field of a data class has no value there


def test_no_ray_is_installed_that_was_not_tested():
    [bound] = re.findall(r'"ray\[[\w,]+\]>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    [tested] = re.findall(r"^ray==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.M)
    major, minor = tested.split(".")
    assert bound == (tested, f"{major}.{int(minor) + 1}")
