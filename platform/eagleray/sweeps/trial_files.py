"""The files that a trial leaves for the driver of its sweep and for its next process: its summary, and the id of what
Ray has reserved for its workers. This module does not import PyTorch, to save memory of the cluster's head."""

from typing import Any

from eagleray.runs import layout, summary
from eagleray.runs.run_store import run_store


def finished_summary(out: str, steps: int = 0) -> dict[str, Any] | None:
    """Return the summary of a trial that has finished after at least `steps` steps, on any machine, else None."""
    text = run_store(out).get(layout.SUMMARY)
    return summary.if_finished(summary.parse_summary(text, f"{out}/{layout.SUMMARY}"), steps)


def placements(out: str) -> Any:
    """Return a callback that stores the id of the placement group of a run's workers, by which their CPUs and GPUs can
    be freed if the run's process dies."""
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback

    class Placements(WorkerGroupCallback):  # type: ignore[misc]
        def after_worker_group_start(self, worker_group: Any) -> None:
            held = worker_group.get_worker_group_state().placement_group_handle.placement_group
            run_store(out).put(layout.PLACEMENT, held.id.hex())

    return Placements()


def free_resources(out: str) -> None:
    """Free the CPUs and GPUs that Ray still reserves for the workers of a trial whose process died."""
    held = run_store(out).get(layout.PLACEMENT)
    if held:
        from ray._raylet import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(held))))
        run_store(out).delete(layout.PLACEMENT)
