"""Save a run before Ray Train changes the number of its workers, so that no step is taken again."""

import contextlib
import threading
import time
from typing import Any

PATIENCE = 120.0  # seconds to wait for the run to save before Ray ends its workers anyway
_asked, _saved = threading.Event(), threading.Event()  # used in rank 0's worker; each start has a new process


def ask_to_save() -> None:
    """Ask the run to save and to end its workers. Called in rank 0's worker."""
    _asked.set()


def asked_to_save() -> bool:
    """Return whether Ray waits for the run to save."""
    return _asked.is_set()


def note_saved() -> None:
    """Let Ray continue. Called in rank 0's worker when all ranks have saved, or have failed."""
    _saved.set()


def has_saved() -> bool:
    """Return whether the run has saved, for which Ray waits. Called in rank 0's worker."""
    return _saved.is_set()


def save_before_resize() -> Any:
    """Return a callback for Ray Train that lets a run save before its workers are replaced by more or fewer.

    Without the callback Ray ends them at once, and the steps since the last checkpoint are lost."""
    import ray
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

    class SaveBeforeResize(ControllerCallback, WorkerGroupCallback):
        group: Any = None

        def after_worker_group_training_start(self, worker_group: Any) -> None:
            self.group = worker_group

        def before_worker_group_shutdown(self, worker_group: Any) -> None:
            self.group = None

        def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
            self.group = None  # no rank can save after a failure: each waits for the failed one

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
