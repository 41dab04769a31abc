"""End Ray Train's controller of a run that is stopped before there was room for its workers, as no worker sees that.

Ray Train keeps the handle of this actor to itself, and its thread in our process waits as long as the actor lives: for
a trial of a sweep, whose process goes on to other trials, that could be for ever.
"""

import time
from typing import Any

BEGIN = 60.0  # seconds that a controller has to start


class Controller:
    """The controller of the run with this name, which writes its handle into Ray's key-value store when it starts."""

    def __init__(self, name: str) -> None:
        self.key = f"eagleray-controller-{name}"

    def callback(self) -> Any:
        """Return the callback for Ray Train that writes the handle."""
        from ray.train.v2._internal.execution.callback import ControllerCallback

        key = self.key
        self.forget()  # an earlier command that was killed left its own

        class Tell(ControllerCallback):  # type: ignore[misc]
            def after_controller_start(self, train_run_context: Any) -> None:
                import ray
                from ray.experimental.internal_kv import _internal_kv_put

                _internal_kv_put(key, ray.cloudpickle.dumps(ray.get_runtime_context().current_actor))

        return Tell()

    def kill(self) -> None:
        """Kill the controller, which has no workers. Ray's own `abort` of it is lost while it looks for room."""
        import ray
        from ray.experimental.internal_kv import _internal_kv_get

        end = time.monotonic() + BEGIN
        while not (handle := _internal_kv_get(self.key)) and time.monotonic() < end:
            time.sleep(0.1)
        if handle:
            ray.kill(ray.cloudpickle.loads(handle))

    def forget(self) -> None:
        """Delete the handle, as the run has ended or is stopped."""
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(self.key)
