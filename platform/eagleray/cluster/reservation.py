"""Ask Ray for the machines of a run under the run's own name, so that a request outlives its driver to some purpose.

Ray Train asks a coordinator of the cluster under a random name. A run with `workers=A..B` gets only machines that no
earlier request reserves, and the request of a controller that has died is kept for three minutes more: a continued run
would wait so long for its dead predecessor. Under the name of the run it takes over that request, with its place among
those of other runs (docs/decisions/0053).
"""

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

COORDINATOR = "AutoscalingCoordinator"  # the name of Ray's actor, and of its namespace
ANSWER = 5.0  # seconds that it has to answer
KEPT = 180.0  # seconds for which it keeps a request that nobody repeats


class Reservation:
    """The request for the machines of the run in `out`."""

    def __init__(self, ray: Any, out: str) -> None:
        self.ray, self.name = ray, hashlib.sha256(out.encode()).hexdigest()[:32]

    def give_name(self, trainer: Any) -> None:
        """Let a trainer of Ray Train ask under the name of the run."""
        object.__setattr__(trainer.train_run_context, "run_id", self.name)  # a field that Ray fills at random

    def amounts(self) -> Mapping[str, float] | None:
        """Return what the coordinator keeps for the run, on all machines together, or None where it does not answer."""
        try:
            asked = self._coordinator().get_reserved_resources.remote(f"train-{self.name}")
            kept = self.ray.get(asked, timeout=ANSWER)
        except (ValueError, self.ray.exceptions.RayError):
            return None
        return sum(map(Counter, kept.values()), Counter[str]())

    def cancel(self) -> None:
        """Take the request back, as the run has ended or waits no more."""
        with contextlib.suppress(ValueError, self.ray.exceptions.RayError):  # Ray forgets it in three minutes
            self.ray.get(self._coordinator().cancel_request.remote(f"train-{self.name}"), timeout=ANSWER)

    def release_dead(self) -> None:
        """Take back the requests of submitted runs whose drivers have just died, unless somebody continues them: this
        run would wait for their machines as long as Ray keeps the requests."""
        from ray.exceptions import RayError
        from ray.util.state import list_jobs
        from ray.util.state.exception import RayStateApiException

        try:
            known: Any = list_jobs(detail=True, limit=10_000, timeout=int(ANSWER), raise_on_missing_output=False)
        except (RayStateApiException, RayError, RuntimeError, OSError):
            return  # Ray forgets the requests later
        running = [job for job in known if job.status in ("PENDING", "RUNNING")]
        for job in known:
            out, ended = (job.metadata or {}).get("out", ""), (job.end_time or 0) / 1000
            if not out or job in running or time.time() - ended > KEPT:
                continue
            # A command that was not submitted has no metadata, but most have the address in their words.
            if not any(out in (j.metadata or {}).get("out", "") or out in (j.entrypoint or "") for j in running):
                Reservation(self.ray, out).cancel()

    def _coordinator(self) -> Any:
        """Return Ray's actor. Raises ValueError when there is none."""
        return self.ray.get_actor(COORDINATOR, namespace=COORDINATOR)
