"""Ask Ray for the machines of a run under the run's own name, so that a continued run takes over its old request.

Ray Train asks Ray's coordinator under a random name. A run with `workers=A..B` gets only machines that no earlier
request reserves, and Ray keeps the request of a controller that has died for three minutes: a continued run would wait
for its dead predecessor. Under the run's name it takes over that request and its place in the queue
(docs/decisions/0053)."""

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

COORDINATOR = "AutoscalingCoordinator"  # name of Ray's actor and of its namespace
ANSWER = 5.0  # seconds to wait for an answer from the coordinator, or for Ray's list of jobs
KEPT = 180.0  # seconds for which the coordinator keeps a request that nobody repeats


class Reservation:
    """The request for the machines of the run in `out`."""

    def __init__(self, ray: Any, out: str) -> None:
        self.ray, self.name = ray, hashlib.sha256(out.encode()).hexdigest()[:32]

    def give_name(self, trainer: Any) -> None:
        """Make a trainer of Ray Train request its machines under the name of the run."""
        object.__setattr__(trainer.train_run_context, "run_id", self.name)  # a field that Ray fills at random

    def amounts(self) -> Mapping[str, float] | None:
        """Return the resources reserved for the run on all machines, or None if the coordinator does not answer."""
        try:
            asked = self._coordinator().get_reserved_resources.remote(f"train-{self.name}")
            kept = self.ray.get(asked, timeout=ANSWER)
        except (ValueError, self.ray.exceptions.RayError):
            return None
        return sum(map(Counter, kept.values()), Counter[str]())

    def cancel(self) -> None:
        """Cancel the request. Called when the run has ended or stops waiting."""
        with contextlib.suppress(ValueError, self.ray.exceptions.RayError):  # if this fails, the request lasts KEPT s
            self.ray.get(self._coordinator().cancel_request.remote(f"train-{self.name}"), timeout=ANSWER)

    def release_dead(self) -> None:
        """Cancel the requests of submitted runs whose drivers have died in the last KEPT seconds. Otherwise this run
        would wait for their machines until Ray drops the requests. Runs that another job continues are left out."""
        from ray.exceptions import RayError
        from ray.util.state import list_jobs
        from ray.util.state.exception import RayStateApiException

        try:
            known: Any = list_jobs(detail=True, limit=10_000, timeout=int(ANSWER), raise_on_missing_output=False)
        except (RayStateApiException, RayError, RuntimeError, OSError):
            return  # Ray drops the requests after KEPT seconds
        running = [job for job in known if job.status in ("PENDING", "RUNNING")]
        for job in known:
            out, ended = (job.metadata or {}).get("out", "").rstrip("/"), (job.end_time or 0) / 1000
            if not out or job in running or time.time() - ended > KEPT:
                continue
            # A run without metadata was not submitted as a job. Its command usually contains the path or URL of `out`.
            if not any(out in (j.metadata or {}).get("out", "") or out in (j.entrypoint or "") for j in running):
                Reservation(self.ray, out).cancel()

    def _coordinator(self) -> Any:
        """Return Ray's coordinator, an actor. Raises ValueError when there is none."""
        return self.ray.get_actor(COORDINATOR, namespace=COORDINATOR)
