"""Submit, list, follow and stop runs and other long commands on a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagleray.api.overrides import Overrides, overrides_of
from eagleray.base.console import say
from eagleray.base.errors import UserError
from eagleray.cluster import jobs as cluster_jobs
from eagleray.cluster.dashboard import locate
from eagleray.cluster.jobs import Job


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
    max_hours: float | None = None,
    address: str | None = None,
    join: bool = False,
    command: str = "pretrain",
    options: Mapping[str, Any] = {},
) -> Job:
    """Submit a run or another long command to a Ray cluster, and return its job. To continue a run, submit it again.

    `recipe`, `overrides`, `out`, `workers`, `plugins` and `max_hours` have the same meaning as in `pretrain`. The data
    and `out` must be s3:// URLs or paths that are the same on all nodes. `gpus=N` requests N workers with one GPU each.
    `address` is the URL of the dashboard on the Ray head node, by default RAY_API_SERVER_ADDRESS or RAY_ADDRESS. If the
    run is already running on the cluster, `join=True` returns the job of this run.

    `command` may also be `finetune`, `tune`, `evaluate`, `prepare` or `index`. For these commands, `recipe` is the
    first argument on the command line, `overrides` lists the other arguments, and `options` has the options by name,
    such as `{"max_concurrent": 4}`.

    Raises UserError for a wrong recipe or address, or if the run is already running and `join` is false.

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
    locate(address)
    variables, stays = job_package.environment()
    arguments = [str(recipe), *overrides_of(overrides, out=out, workers=workers)]
    package = job_commands.pack(command, arguments, options, plugins, gpus)
    if max_hours is not None:
        package = job_commands.limited(package, max_hours)
    if gpu and package.recipe:
        from eagleray.datasets.catalogue import images_of
        from eagleray.runs.local_forecast import check_named

        check_named(package.recipe, images_of(package.name), gpu, insist=insist)
    cluster = cluster_jobs.Cluster(address)
    for line in [*stays, *(f"sent with it: {k}={v}" for k, v in variables.items())]:
        say(line)
    return _job(cluster, cluster.job(cluster_jobs.submit(cluster, package, variables, say, join=join)))


def jobs(address: str | None = None) -> list[Job]:
    """Return the runs and other commands that were submitted to a cluster, oldest first. The attribute `waits` of a job
    says what the job is waiting for. Raises UserError.

    Example:

        for job in eagleray.jobs():
            print(job.id, job.state, job.out)
    """
    cluster = cluster_jobs.Cluster(address)
    known = cluster.jobs()
    return [_job(cluster, job, known) for job in known]


def job(id: str, *, address: str | None = None) -> Job:
    """Return the submitted run or command with this id. Raises UserError if the cluster has no job with this id.

    Example:

        for known in eagleray.jobs():
            print(eagleray.job(known.id).logs())
    """
    cluster = cluster_jobs.Cluster(address)
    return _job(cluster, cluster.job(id))


def _job(cluster: cluster_jobs.Cluster, job: Job, known: Sequence[Job] | None = None) -> Job:
    """Return a job with its reason to wait and the cluster's address. `known` are all jobs, if already listed."""
    return replace(job, waits=cluster.waits(job, known), address=cluster.address)
