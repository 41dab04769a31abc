"""Submit, list, follow and stop runs and other long commands on a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagleray.api.overrides import Overrides, overrides_of
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.cluster import jobs as cluster_jobs
from eagleray.cluster.jobs import Cluster


@dataclass(frozen=True)
class Job(cluster_jobs.Job):
    """A run that was submitted to a cluster, with its state at the time of the request."""

    address: str = ""  # the URL of the cluster's dashboard

    def follow(self) -> int:
        """Print the run's output until it ends, and return its exit status. Ctrl-C stops the printing, not the run.
        Raises Outage when the head stays away."""
        return cluster_jobs.follow(Cluster(self.address), self.id, say)

    def logs(self) -> str:
        """Return what the run has printed so far."""
        return Cluster(self.address).logs(self.id)

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end, and wait until it has. Submitting the run again continues it.
        Raises Outage when it does not end."""
        cluster_jobs.stop(Cluster(self.address), self.id, say)


def submit(
    recipe: str | Path,
    overrides: Overrides | None = None,
    *,
    out: str | None = None,
    workers: int | str | None = None,
    plugins: Sequence[str | Path] = (),
    gpus: int | None = None,
    gpu: str | None = None,
    insist: bool = False,
    address: str | None = None,
    join: bool = False,
    command: str = "pretrain",
    options: Mapping[str, Any] = {},
) -> Job:
    """Send a run or another long command to a Ray cluster, or let it continue there, and return its job.

    `recipe`, `overrides`, `out`, `workers` and `plugins` are as in `pretrain`; data and `out` are s3:// URLs or paths
    that are the same on all nodes. `gpus` stands for as many workers with a GPU each. `address` is the dashboard of the
    Ray head, by default RAY_API_SERVER_ADDRESS or RAY_ADDRESS. With `join` a run that is running there already is
    returned.

    `command` may also be `finetune`, `tune`, `evaluate`, `prepare` or `index`. `recipe` is then its first argument on
    the command line, `overrides` lists the further ones, and `options` has its options by name, such as
    `{"max_concurrent": 4}`.

    Raises UserError for a wrong recipe or address, and for a run that is running there already without `join`.

    Example:

        job = eagleray.submit(
            "dino_vits16_in1k_ep100", {"data.train": "s3://bucket/train"}, out="s3://bucket/runs/first", gpus=16
        )
        job.id, job.state
    """
    from eagleray.api import job_commands
    from eagleray.cluster import job_package

    if command not in job_commands.COMMANDS:
        raise UserError(f"command={command}: expected one of {', '.join(job_commands.COMMANDS)}")
    cluster_jobs.locate(address)
    variables, stays = job_package.environment()
    arguments = [str(recipe), *overrides_of(overrides, out=out, workers=workers)]
    package = job_commands.pack(command, arguments, options, plugins, gpus)
    if gpu and package.recipe:
        from eagleray.api.planning import check_named

        check_named(package.recipe, package.name, gpu, insist=insist)
    cluster = Cluster(address)
    for line in [*stays, *(f"sent with it: {k}={v}" for k, v in variables.items())]:
        say(line)
    return job(cluster_jobs.submit(cluster, package, variables, say, join=join), address=address)


def jobs(address: str | None = None) -> list[Job]:
    """Return the runs and other commands that were submitted to a cluster, oldest first. `waits` says what one of them
    waits for. Raises UserError.

    Example:

        for job in eagleray.jobs():
            print(job.id, job.state, job.out)
    """
    cluster = Cluster(address)
    return [_job(cluster, job) for job in cluster.jobs()]


def job(id: str, *, address: str | None = None) -> Job:
    """Return a submitted run by its id. Raises UserError when no run has this id.

    Example:

        for known in eagleray.jobs():
            print(eagleray.job(known.id).logs())
    """
    cluster = Cluster(address)
    return _job(cluster, cluster.job(id))


def _job(cluster: Cluster, job: cluster_jobs.Job) -> Job:
    """Return a job with what it waits for."""
    return Job(**vars(replace(job, waits=cluster.waits(job))), address=cluster.address)
