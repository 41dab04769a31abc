"""Kill Ray Train's controller, an actor, when a run is stopped before it has workers that could see the request.

Ray Train gives no access to the actor's handle, and its thread in our process waits until the actor ends. In the
process of a sweep's trial, which runs other trials afterwards, it could wait for ever."""

import time
from typing import Any

BEGIN = 60.0  # seconds to wait until the controller has written its handle


class Controller:
    """Ray Train's controller of the run `name`. It stores its handle in Ray's key-value store when it starts."""

    def __init__(self, name: str) -> None:
        self.key = f"eagleray-controller-{name}"

    def callback(self) -> Any:
        """Return a callback for Ray Train that writes the controller's handle."""
        from ray.train.v2._internal.execution.callback import ControllerCallback

        key = self.key
        self.forget()  # a command that was killed may have left its controller's handle

        class Tell(ControllerCallback):  # type: ignore[misc]
            def after_controller_start(self, train_run_context: Any) -> None:
                import ray
                from ray.experimental.internal_kv import _internal_kv_put

                _internal_kv_put(key, ray.cloudpickle.dumps(ray.get_runtime_context().current_actor))

        return Tell()

    def kill(self) -> None:
        """Kill the controller of a run that waits for resources. Meanwhile the controller's `abort` has no effect."""
        import ray
        from ray.experimental.internal_kv import _internal_kv_get

        end = time.monotonic() + BEGIN
        while not (handle := _internal_kv_get(self.key)) and time.monotonic() < end:
            time.sleep(0.1)
        if handle:
            ray.kill(ray.cloudpickle.loads(handle))

    def forget(self) -> None:
        """Delete the stored handle, at the end of the run or if a command that was killed has left it behind."""
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(self.key)
