"""Save a run before Ray Train changes the number of its workers, so that no step is taken again."""

import contextlib
import threading
import time
from typing import Any

PATIENCE = 120.0  # seconds that a run has to save; then Ray ends the workers without it
_asked, _saved = threading.Event(), threading.Event()  # rank 0's process sets them, anew for each start of the workers


def ask_to_save() -> None:
    """Ask the run to save and to end its workers. Called in the process of rank 0."""
    _asked.set()


def asked_to_save() -> bool:
    """Return whether Ray is waiting for the run to save."""
    return _asked.is_set()


def note_saved() -> None:
    """Let Ray go on. Called in the process of rank 0 when all ranks have saved, or have failed."""
    _saved.set()


def has_saved() -> bool:
    """Return whether the run has saved what Ray waits for. Called in the process of rank 0."""
    return _saved.is_set()


def save_before_resize() -> Any:
    """Return a callback for Ray Train that makes a run save before its workers are ended to start more or fewer.

    Without it Ray ends them at once, and the steps since the last checkpoint are lost.
    """
    import ray
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

    class SaveBeforeResize(ControllerCallback, WorkerGroupCallback):
        group: Any = None

        def after_worker_group_training_start(self, worker_group: Any) -> None:
            self.group = worker_group

        def before_worker_group_shutdown(self, worker_group: Any) -> None:
            self.group = None

        def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
            self.group = None  # the ranks that are left wait for the failed one and cannot save

        def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
            if self.group is None:  # there is nothing to save before the first start and after a failure
                return
            end = time.monotonic() + PATIENCE
            # If rank 0 has died or hangs, the run continues from its newest checkpoint.
            with contextlib.suppress(ray.exceptions.RayError):
                self._call(ask_to_save)
                while not self._call(has_saved) and time.monotonic() < end:
                    time.sleep(0.2)

        def _call(self, function: Any) -> Any:
            return ray.get(self.group.execute_single_async(0, function), timeout=PATIENCE)

    return SaveBeforeResize()
