"""Submit, follow, list and stop commands as jobs of a Ray cluster, by HTTP requests to the Jobs API of its dashboard.

Only `submit` uses Ray's own client, as importing Ray takes a second."""

import logging
import os
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.base import console
from eagleray.base.errors import Outage, UserError
from eagleray.base.user import NAME
from eagleray.cluster.dashboard import ADDRESS, TokenRefused, ask, locate
from eagleray.cluster.waiting import SOON
from eagleray.cluster.waiting import START as WAITING
from eagleray.config import nearest

if TYPE_CHECKING:
    from eagleray.cluster.job_package import JobPackage

# ENTRY, the shell command of a job, runs the Python of Ray, which may not be the `python` on PATH. The shell's parent
# process belongs to Ray: its memory maps contain the path of Ray's library, from which sed derives that of Python.
LIBRARY = r"s|.* \(/.*\)/lib[^/]*/python[^/]*/[^/]*/ray/_raylet.so$|\1/bin/python3|p"
ENTRY = (
    f"p=$(sed -n '{LIBRARY}' /proc/$PPID/maps | head -n 1); "
    '[ -x "$p" ] || p=python3; exec "$p" eagleray/cluster/job_start.py eagleray.cli'
)
TIMEOUTS = (4, 30)  # seconds to wait for the connection, and for an answer
PATIENCE = 300  # seconds that `follow` waits for a head that has stopped answering
STOPPING = 300  # seconds that a run has to end after a request to stop, before Ray kills it
MEMORY = 2**30  # bytes of the head's memory reserved for a job, measured with benchmarks/head_memory.py
HEAD = "node:__internal_head__"  # a resource that only the head has
POLL = 1.0  # least number of seconds between two requests for a job's state and log
RATE = 2**20  # bytes of log to fetch per second at most: Ray returns the whole log each time
STATES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 1}  # final states, and the exit status if Ray reports none
# Ray stops a job and its child processes with SIGINT, as ray.init installs its own handler for SIGTERM. Processes that
# load data ignore SIGINT.
STOP = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(STOPPING)}
Say = Callable[[str], None]


class Silent(Outage):
    """The head does not answer, or its answer cannot be understood."""


class Unknown(UserError):
    """The head has no such job."""


@dataclass(frozen=True)
class Job:
    """A run or command that was submitted to a cluster. Call `eagleray.job` again for a newer `state`."""

    id: str
    state: str  # pending, running, succeeded, failed, stopped
    recipe: str  # the name of a recipe, sweep, backbone or data set
    out: str
    digest: str
    since: float  # time of the start in seconds since 1970
    seconds: float
    status: int | None  # exit status; None while it runs, or where Ray has none
    message: str
    command: str = "pretrain"
    user: str = ""  # name of the submitter
    waits: str = ""  # what a pending or running job waits for, in words; "" if it does not wait
    address: str = ""  # the URL of the cluster's dashboard

    @classmethod
    def _of(cls, details: Mapping[str, Any]) -> "Job":
        """Return the job that `details`, an answer of Ray's Jobs API, describe. Raises KeyError for another answer."""
        since = (details.get("start_time") or 0) / 1000
        end = details["end_time"] / 1000 if details.get("end_time") else time.time()
        labels = details.get("metadata") or {}
        return cls(
            details["submission_id"],
            details["status"].lower(),
            labels.get("recipe", ""),
            labels.get("out", ""),
            labels.get("digest", ""),
            since,
            round(max(end - since, 0), 1),
            details.get("driver_exit_code"),
            _why(details.get("message") or ""),
            labels.get("eagleray", ""),
            labels.get("user", ""),
        )

    @property
    def ended(self) -> bool:
        return self.state.upper() in STATES

    @property
    def _exits(self) -> int:
        """Return the exit status for a command that has followed the job to its end: 128 + N after signal N."""
        code = self.status if self.status is not None else STATES[self.state.upper()]
        return 128 - code if code < 0 else min(code, 255)

    @property
    def killed_by(self) -> str:
        """Return the name of the signal that killed the command on the Ray head node, or an empty string."""
        number = self._exits - 128 if self.ended else 0
        return signal.Signals(number).name if number in set(signal.Signals) else ""

    def follow(self) -> int:
        """Print the run's output until the run ends, and return its exit status. Ctrl-C stops the printing, not the
        run. Raises Outage if the Ray head node stops answering."""
        return follow(Cluster(self.address), self.id, console.say)

    def logs(self) -> str:
        """Return everything that the run has printed so far."""
        return Cluster(self.address).logs(self.id)

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end, and wait until it has ended. To continue the run, submit it again.
        Raises Outage if the run does not end in time."""
        stop(Cluster(self.address), self.id, console.say)

    def _ending(self) -> str:
        """Return a sentence on how the job ended."""
        if self.state == "stopped":
            return f"{self.id}: stopped; submitting the same run again continues it"
        if self.state == "failed" and self.status is None:
            told = self.message or "Ray does not say why"
            return f"{self.id}: failed without an exit status: {told}; submitting the same run again continues it"
        killed = f": killed by {self.killed_by}" if self.killed_by else ""
        return f"{self.id}: {self.state}" + (f", exit status {self._exits}{killed}" if self._exits else "")


class Cluster:
    """The head node of a Ray cluster. Methods raise UserError without a valid token, and Silent without an answer."""

    def __init__(self, address: str | None) -> None:
        """Connect to the head at `locate(address)`. Raises UserError without an address, or when no head answers."""
        self.address = locate(address)
        if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        try:
            with self._asked():
                self._ask("/api/version")["ray_version"]
        except Silent as e:
            raise UserError(f"{e}; expected the dashboard of a Ray head, such as http://head:8265") from None

    def jobs(self) -> list[Job]:
        """Return the jobs that eagleray submitted, oldest first."""
        with self._asked():
            every = self._ask("/api/jobs/")
            ours = [Job._of(j) for j in every if j.get("submission_id") and "eagleray" in (j.get("metadata") or {})]
        return sorted(ours, key=lambda j: j.since)

    def job(self, name: str) -> Job:
        """Return the job with this id. Raises Unknown when there is none."""
        try:
            with self._asked():
                return Job._of(self._ask(f"/api/jobs/{name}"))
        except Silent:
            known = [j.id for j in self.jobs()]
            if name in known:
                raise
            hint = nearest(name, known) if known else ""
            raise Unknown(f"{name}: no such job at {self.address}{hint}") from None

    def logs(self, name: str) -> str:
        """Return what the run has printed so far, without the lines that Ray prints before it."""
        with self._asked():
            text: str = self._ask(f"/api/jobs/{name}/logs")["logs"] or ""
        return text.partition("Running entrypoint for job ")[2].partition("\n")[2]

    def waits(self, job: Job, known: Sequence[Job] | None = None) -> str:
        """Return a text on what a job waits for, or "" if it does not wait or the head does not answer. A pending job
        waits for memory of the head; a running one says it in its log's last line. `known` are all jobs, if listed."""
        if job.state not in ("pending", "running") or (job.state == "pending" and job.seconds <= SOON):
            return ""
        try:
            if job.state == "pending":
                return _queue(self.jobs() if known is None else known)
            last = self.logs(job.id).rstrip().rpartition("\n")[2]
        except Silent:
            return ""
        return last if last.startswith(WAITING) else ""

    def submit(self, name: str, package: "JobPackage", variables: dict[str, str], memory: int) -> None:
        """Submit a package as the job `name` with the environment `variables`. Ray starts it as soon as `memory` bytes
        of the head are not reserved. Raises Silent without an answer, and when another job has the name."""
        with tempfile.TemporaryDirectory() as folder, self._asked(), _through_ray(self.address):
            package.write(Path(folder))
            variables = variables | STOP | {NAME: package.labels["user"]}
            runtime = {"working_dir": folder, "env_vars": variables}
            _client(self.address).submit_job(
                entrypoint=f"{ENTRY} {shlex.join(package.words)}",
                submission_id=name,
                runtime_env=runtime,
                metadata=package.labels,
                entrypoint_memory=memory,
                entrypoint_resources={HEAD: 0.001},  # runs it on the head, which is not preempted as spot nodes are
            )

    def stop(self, name: str) -> bool:
        """Ask a job to end. Returns False when Ray cannot stop it because it has not started yet."""
        with self._asked():
            return bool(self._ask(f"/api/jobs/{name}/stop", verb="POST")["stopped"])

    def size(self) -> tuple[str, int]:
        """Return a text on the cluster's nodes, CPUs and GPUs, and the head's memory for jobs in bytes (0: unknown)."""
        from ray.util.state import list_nodes
        from ray.util.state.exception import RayStateApiException

        alive: Any = [("state", "=", "ALIVE")]
        try:
            with self._asked(), _through_ray(self.address):
                # Nodes that have died are missing in Ray's answer, for which it would raise an error.
                nodes = list_nodes(
                    self.address, alive, limit=10_000, timeout=TIMEOUTS[1], raise_on_missing_output=False
                )
        except (RayStateApiException, Silent):
            return "does not say what it has", 0  # the size is only printed, so the run goes on without it
        cpus, gpus = (sum((n.resources_total or {}).get(kind, 0) for n in nodes) for kind in ("CPU", "GPU"))
        memory = sum((n.resources_total or {}).get("memory", 0) for n in nodes if n.is_head_node)
        return f"has {len(nodes)} node(s) with {cpus:g} CPUs and {gpus:g} GPUs now", int(memory)

    def _ask(self, path: str, *, verb: str = "GET") -> Any:
        return ask(self.address, path, verb=verb, timeouts=TIMEOUTS)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """A context that turns a refused token into UserError, and any other error of a request into Silent."""
        try:
            yield
        except TokenRefused as e:
            raise UserError(
                f"{self.address}: the cluster {'requires a token' if e.missing else 'refuses the token'}; set "
                "RAY_AUTH_MODE=token, and put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token"
            ) from None
        except (RuntimeError, OSError, KeyError, TypeError, AttributeError) as e:
            raise Silent(f"{self.address}: {_reason(e, ' '.join(str(e).split()))}") from None


@contextmanager
def _through_ray(address: str) -> Iterator[None]:
    """A context in which Ray's client asks the head at `address`, and its errors become those that `ask` raises."""
    from ray.exceptions import AuthenticationError, RayError

    before = os.environ.get(ADDRESS)
    os.environ[ADDRESS] = address  # otherwise Ray's client would prefer RAY_ADDRESS
    try:
        yield
    except AuthenticationError as e:
        raise TokenRefused(missing=not str(e).startswith("Authentication failed")) from None
    except RayError as e:
        raise RuntimeError(str(e)) from None
    finally:
        del os.environ[ADDRESS]
        os.environ |= {} if before is None else {ADDRESS: before}


def _queue(known: Sequence[Job]) -> str:
    """Return a text on the memory of the head that a pending job waits for. `known` are all jobs of the cluster."""
    others = sum(job.state == "running" for job in known)
    return f"{WAITING}{MEMORY / 2**30:g} GiB of the head's memory; {others} job(s) run there with as much each"


def _client(address: str) -> Any:
    """Return Ray's client, which packs and uploads a folder, with a timeout for every request."""
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, *args: Any, **more: Any) -> Any:
            """Send a request with a timeout. Ray's own method would wait for ever when the head is gone."""
            return super()._do_request(*args, timeout=TIMEOUTS, **more)

    for name in "dashboard.modules.dashboard_sdk", "_private.authentication", "_private.runtime_env.packaging":
        logging.getLogger(f"ray.{name}").setLevel(logging.CRITICAL)  # no logs, as errors are raised too
    return Client(address)


def _reason(error: Exception, said: str) -> str:
    """Return one line about an error. `said` is its message, which may be a whole page or traceback."""
    if code := re.search(r"status code (\d+): (.*)", said):
        return f"it answered {code[1]}: {code[2][-200:]}"
    answer = getattr(error, "response", None)
    if answer is not None:
        return f"it answered {answer.status_code}"
    if isinstance(error, KeyError | ValueError | TypeError | AttributeError):
        return "something answered that is not a Ray head"
    return "nobody answers there" if isinstance(error, OSError) else said[:200]


def _why(message: str) -> str:
    """Return the last line that begins with "error: " of Ray's message about a job, or else the message's beginning."""
    errors = [line for line in message.splitlines() if line.startswith("error: ")]
    return errors[-1] if errors else " ".join(message.split())[:300]


def submit(cluster: Cluster, package: "JobPackage", variables: dict[str, str], say: Say, *, join: bool) -> str:
    """Submit a command, and return its job id. If the same command runs already, return the id of its job with `join`,
    else raise UserError. Also raises UserError when a command with other options works on the same `out`."""
    while True:
        known = cluster.jobs()
        family = [j for j in known if re.fullmatch(re.escape(package.id) + r"(-\d+)?", j.id)]
        if running := next((j for j in family if not j.ended), None):
            if running.digest != package.labels["digest"]:
                other = "is training another recipe there" if package.recipe else "works there with other options"
                raise UserError(f"out={package.out}: the job {running.id} {other}; give another out")
            if not join:
                raise UserError(f"{running.id}: {package.busy} already; {manage(running.id)}")
            say(f"{running.id}: {package.busy} already")
            return running.id
        number = max((int(j.id[len(package.id) + 1 :] or 1) for j in family), default=0) + 1
        name = package.id if number == 1 else f"{package.id}-{number}"
        size, memory = cluster.size()
        say(f"the cluster {size}; this asks for {package.asks}")
        try:
            cluster.submit(name, package, variables, min(MEMORY, memory or MEMORY))
        except Silent as e:
            if "already exists" not in str(e):
                raise
            continue  # another job got this name after the jobs were listed
        what = package.name if package.recipe else f"{package.command} {package.name}"
        say(f"{name}: submitted, {what} to {package.out}; {manage(name)}")
        if memory and sum(not j.ended for j in known) >= max(memory // MEMORY, 1):
            say(
                f"{name}: waits until another job has ended: each takes {MEMORY / 2**30:g} GiB of the head, which has "
                f"{memory / 2**30:.1f} GiB for jobs"
            )
        return name


def manage(name: str) -> str:
    """Return a text with the commands that follow and stop a job."""
    return f"`eagleray logs {name} --follow` follows it, `eagleray stop {name}` ends it"


def follow(cluster: Cluster, name: str, say: Say, *, patience: float = PATIENCE) -> int:
    """Print a job's output until it ends, and return its exit status. Raises Outage if the head does not answer for
    more than `patience` seconds, or has restarted and lost the job."""
    told, lost, job, waits = 0, 0.0, cluster.job(name), ""
    while True:
        try:
            job = cluster.job(name)  # the state is read before the log, which is complete once the job has ended
            text = cluster.logs(name)
            before, waits = waits, cluster.waits(job) if job.state == "pending" else ""
        except Silent as e:
            if not lost:
                say(f"{e}; trying again for {patience:.0f} s, which does not disturb the job")
            lost = lost or time.monotonic()
            waited = time.monotonic() - lost
            if waited > patience:
                raise Outage(f"{e} for {patience:.0f} s; the job may still be running: {manage(name)}") from None
            time.sleep(min(max(waited, POLL), 30, patience))
            continue
        except Unknown:  # the head has restarted without its list of jobs
            again = "submitting the run again continues it"
            raise Outage(f"{name}: the head has restarted and does not know this job; {again}") from None
        lost = 0.0
        if waits and waits != before:
            say(waits)
        new = text[told:] if job.ended else text[told : text.rfind("\n") + 1]
        told += len(new)
        for line in new.splitlines():
            say(line)
        if job.ended:
            say(job._ending())
            return job._exits
        time.sleep(POLL + len(text) / RATE)


def stop(cluster: Cluster, name: str, say: Say) -> None:
    """Ask a job to save and end, and wait until it has ended. Raises UserError when there is no such job, and Outage
    when it cannot be stopped before its start or does not end in time."""
    job = cluster.job(name)
    if job.ended:
        say(f"{name}: had ended already: {job.state}")
        return
    if not cluster.stop(name):
        raise Outage(f"{name}: cannot be stopped before it has started; try again later")
    if job.state == "pending":
        say(f"{name}: had not started, and ends as soon as it does")
        return
    say(f"{name}: asked to save and stop after its current step; Ray kills it after {STOPPING} s")
    end = time.monotonic() + STOPPING + 60
    while not (job := cluster.job(name)).ended:
        if time.monotonic() > end:
            raise Outage(f"{name}: still {job.state}, though it was asked to stop, after {STOPPING + 60} s")
        time.sleep(POLL)
    for line in cluster.logs(name).splitlines()[-1:]:
        say(line)
    say(job._ending())
