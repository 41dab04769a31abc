"""Submit, follow, list and stop commands as jobs of a Ray cluster, over HTTP through Ray's Jobs API."""

import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.base.errors import Outage, UserError
from eagleray.cluster import head
from eagleray.cluster.waiting import START as WAITING
from eagleray.config import nearest

if TYPE_CHECKING:
    from eagleray.cluster.job_package import JobPackage

# What the head runs, with the package as its working folder: the interpreter of the Ray that started it, whatever
# `python` is on PATH. Its parent, a process of that Ray, has the library of its environment in memory.
LIBRARY = r"s|.* \(/.*\)/lib[^/]*/python[^/]*/[^/]*/ray/_raylet.so$|\1/bin/python3|p"
ENTRY = (
    f"p=$(sed -n '{LIBRARY}' /proc/$PPID/maps | head -n 1); "
    '[ -x "$p" ] || p=python3; exec "$p" eagleray/cluster/job_start.py eagleray.cli'
)
TIMEOUTS = (4, 30)  # seconds to connect, and to wait for an answer
PATIENCE = 300  # seconds that a follower waits for a head that was there before
STOPPING = 300  # seconds for a stopped run to save, then Ray kills it
POLL = 1.0  # seconds between two looks at a job
RATE = 2**20  # bytes of log per second that looks may cost: Ray gives the whole log every time
STATES = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 1}  # those that are final, and what a command exits with
# Ray sends the signal to all children too: loader processes ignore SIGINT, and ray.init takes SIGTERM for itself.
STOP = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(STOPPING)}
Say = Callable[[str], None]


class Silent(Outage):
    """The head does not answer, or its answer cannot be understood."""


class Unknown(UserError):
    """The head has no such job."""


@dataclass(frozen=True)
class Job:
    """A job as the cluster describes it."""

    id: str
    state: str  # pending, running, succeeded, failed, stopped
    recipe: str  # or sweep, backbone, data
    out: str
    digest: str
    since: float  # seconds since 1970
    seconds: float
    status: int | None  # exit status; None while it runs, or where Ray has none
    message: str
    command: str = "pretrain"
    waits: str = ""  # what it waits for, in words, where it does

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> "Job":
        """Return the job that `details` of the Jobs API describe. Raises KeyError when they describe no job."""
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
            " ".join((details.get("message") or "").split())[:300],
            labels.get("eagleray", ""),
        )

    @property
    def ended(self) -> bool:
        return self.state.upper() in STATES

    @property
    def exits(self) -> int:
        """Return the exit status for a command that has followed the job to its end."""
        code = self.status if self.status is not None else STATES[self.state.upper()]
        return code if 0 <= code < 256 else 1

    def end(self) -> str:
        """Return in words how the job ended."""
        if self.state == "stopped":
            return f"{self.id}: stopped; submitting the same run again continues it"
        if self.state == "failed" and self.status is None:
            told = self.message or "Ray does not say why"
            return f"{self.id}: failed without an exit status: {told}; submitting the same run again continues it"
        return f"{self.id}: {self.state}" + (f", exit status {self.exits}" if self.exits else "")


class Cluster:
    """The head of a cluster. Every method raises UserError when the token is refused, and Silent when the head does
    not answer."""

    def __init__(self, address: str | None) -> None:
        """Connect to the head. Raises UserError when there is none at the address."""
        self.address = locate(address)
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # RAY_ADDRESS would win over what we say
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
            ours = [Job.of(j) for j in every if j.get("submission_id") and "eagleray" in (j.get("metadata") or {})]
        return sorted(ours, key=lambda j: j.since)

    def job(self, name: str) -> Job:
        """Return the job with this id. Raises Unknown when there is none."""
        try:
            with self._asked():
                return Job.of(self._ask(f"/api/jobs/{name}"))
        except Silent:
            known = [j.id for j in self.jobs()]
            if name in known:
                raise
            hint = nearest(name, known) if known else ""
            raise Unknown(f"{name}: no such job at {self.address}{hint}") from None

    def logs(self, name: str) -> str:
        """Return what the run has printed so far, without Ray's own first lines."""
        with self._asked():
            text: str = self._ask(f"/api/jobs/{name}/logs")["logs"] or ""
        return text.partition("Running entrypoint for job ")[2].partition("\n")[2]

    def waits(self, job: Job) -> str:
        """Return what a job waits for, in words: the last line of its log, if that says so. Otherwise, and where the
        head does not answer, an empty string."""
        if job.state == "pending":
            return job.message
        if job.state != "running":
            return ""
        try:
            last = self.logs(job.id).rstrip().rpartition("\n")[2]
        except Silent:
            return ""
        return last if last.startswith(WAITING) else ""

    def submit(self, name: str, package: "JobPackage", variables: dict[str, str]) -> None:
        """Submit a package as a job with this id and these environment variables. Raises Silent, also when another
        job has the id already."""
        with tempfile.TemporaryDirectory() as folder, self._asked(), _through_ray():
            package.write(Path(folder))
            runtime = {"working_dir": folder, "env_vars": variables | STOP}
            # No resources: Ray puts such a job's driver on the head, which is no spot node.
            client = _client(self.address)
            line = f"{ENTRY} {shlex.join(package.words)}"
            client.submit_job(entrypoint=line, submission_id=name, runtime_env=runtime, metadata=package.labels)

    def stop(self, name: str) -> bool:
        """Ask a job to end; return False when it has not started."""
        with self._asked():
            return bool(self._ask(f"/api/jobs/{name}/stop", verb="POST")["stopped"])

    def size(self) -> str:
        """Return in words how many nodes, CPUs and GPUs the cluster has now."""
        from ray.util.state import list_nodes
        from ray.util.state.exception import RayStateApiException

        try:
            with self._asked(), _through_ray():
                nodes = list_nodes(self.address, filters=[("state", "=", "ALIVE")], limit=10_000, timeout=TIMEOUTS[1])
        except (RayStateApiException, Silent):
            return "not told what it has"  # a run does not need to know
        cpus, gpus = (sum((n.resources_total or {}).get(kind, 0) for n in nodes) for kind in ("CPU", "GPU"))
        return f"has {len(nodes)} node(s) with {cpus:g} CPUs and {gpus:g} GPUs now"

    def _ask(self, path: str, *, verb: str = "GET") -> Any:
        return head.ask(self.address, path, verb=verb, timeouts=TIMEOUTS)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """A context that turns the errors of a request into UserError for a refused token, and Silent for everything
        else."""
        try:
            yield
        except head.TokenRefused as e:
            raise UserError(
                f"{self.address}: the cluster {'requires a token' if e.missing else 'refuses the token'}; set "
                "RAY_AUTH_MODE=token, and put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token"
            ) from None
        except (RuntimeError, OSError, KeyError, TypeError, AttributeError) as e:
            raise Silent(f"{self.address}: {_reason(e, ' '.join(str(e).split()))}") from None


def locate(address: str | None) -> str:
    """Return the address of the head: the given one, or that of RAY_API_SERVER_ADDRESS or RAY_ADDRESS. Raises
    UserError."""
    for name, given in [("--address", address)] + [
        (n, os.environ.get(n)) for n in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    ]:
        if given and "@" in given:
            raise UserError(
                f"{name}: contains a user or password; expected the plain address, with "
                "the token in the variable RAY_AUTH_TOKEN"
            )
        if given and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", given):
            raise UserError(f"{name} {given}: expected the dashboard of a Ray head, such as http://head:8265")
        if given:
            return given.rstrip("/")
    raise UserError("--address: missing; expected the dashboard of a Ray head, such as http://head:8265")


@contextmanager
def _through_ray() -> Iterator[None]:
    """Turn the errors of Ray's own client into those of `head.ask`."""
    from ray.exceptions import AuthenticationError, RayError

    try:
        yield
    except AuthenticationError as e:
        raise head.TokenRefused(missing=not str(e).startswith("Authentication failed")) from None
    except RayError as e:
        raise RuntimeError(str(e)) from None


def _client(address: str) -> Any:
    """Return Ray's own client, which packs and uploads a folder."""
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, *args: Any, **more: Any) -> Any:
            """Send a request with a timeout: Ray's own method would wait forever for a head that is gone."""
            return super()._do_request(*args, timeout=TIMEOUTS, **more)

    for name in "dashboard.modules.dashboard_sdk", "_private.authentication", "_private.runtime_env.packaging":
        logging.getLogger(f"ray.{name}").setLevel(logging.CRITICAL)  # what they say, we say
    return Client(address)


def _reason(error: Exception, said: str) -> str:
    """Return one line about an error whose message may be a whole page or traceback."""
    if code := re.search(r"status code (\d+): (.*)", said):
        return f"it answered {code[1]}: {code[2][-200:]}"
    answer = getattr(error, "response", None)
    if answer is not None:
        return f"it answered {answer.status_code}"
    if isinstance(error, KeyError | ValueError | TypeError | AttributeError):
        return "something answered that is not a Ray head"
    return "nobody answers there" if isinstance(error, OSError) else said[:200]


def submit(cluster: Cluster, package: "JobPackage", variables: dict[str, str], say: Say, *, join: bool) -> str:
    """Submit a command, and return its job id. If the same one is being run already, raises UserError, or with `join`
    returns the id of that job."""
    while True:
        family = [j for j in cluster.jobs() if re.fullmatch(re.escape(package.id) + r"(-\d+)?", j.id)]
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
        say(f"the cluster {cluster.size()}; this asks for {package.asks}")
        try:
            cluster.submit(name, package, variables)
        except Silent as e:
            if "already exists" not in str(e):
                raise
            continue  # somebody was faster
        what = package.name if package.recipe else f"{package.command} {package.name}"
        say(f"{name}: submitted, {what} to {package.out}; {manage(name)}")
        return name


def manage(name: str) -> str:
    """Return the commands that follow and stop a job."""
    return f"`eagleray logs {name} --follow` follows it, `eagleray stop {name}` ends it"


def follow(cluster: Cluster, name: str, say: Say, *, patience: float = PATIENCE) -> int:
    """Print the output of a job until it ends. Returns its exit status; raises Outage when the head stays away."""
    told, lost, job = 0, 0.0, cluster.job(name)
    while True:
        try:
            job = cluster.job(name)  # read first: the log is complete once the job has ended
            text = cluster.logs(name)
        except Silent as e:
            if not lost:
                say(f"{e}; trying again for {patience:.0f} s, which does not disturb the job")
            lost = lost or time.monotonic()
            waited = time.monotonic() - lost
            if waited > patience:
                raise Outage(f"{e} for {patience:.0f} s; the job may still be running: {manage(name)}") from None
            time.sleep(min(max(waited, POLL), 30, patience))
            continue
        except Unknown:  # a head that began anew
            again = "submitting the run again continues it"
            raise Outage(f"{name}: the head has restarted and does not know this job; {again}") from None
        lost = 0.0
        new = text[told:] if job.ended else text[told : text.rfind("\n") + 1]
        told += len(new)
        for line in new.splitlines():
            say(line)
        if job.ended:
            say(job.end())
            return job.exits
        time.sleep(POLL + len(text) / RATE)


def stop(cluster: Cluster, name: str, say: Say) -> None:
    """Ask a job to save and end, and wait until it has ended. Raises UserError, and Outage when it does not end."""
    job = cluster.job(name)
    if job.ended:
        say(f"{name}: had ended already: {job.state}")
        return
    if not cluster.stop(name):
        raise Outage(f"{name}: cannot be stopped before it has started; try again later")
    say(f"{name}: asked to save and stop after its current step; Ray kills it after {STOPPING} s")
    end = time.monotonic() + STOPPING + 60
    while not (job := cluster.job(name)).ended:
        if time.monotonic() > end:
            raise Outage(f"{name}: still {job.state}, though it was asked to stop, after {STOPPING + 60} s")
        time.sleep(POLL)
    for line in cluster.logs(name).splitlines()[-1:]:
        say(line)
    say(job.end())
