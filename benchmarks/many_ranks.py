"""Measure what many ranks on one machine cost: the time to the first step, memory, and requests to the store.

The ranks are those of a run on a Ray of this machine, whose folder is in a real S3 server and whose images are on this
machine, so that all requests are about the run itself. They pass through a server that counts them. Prints, or with
--json in one object:

first_step_s         seconds from the command to the line of the first step
pss_mib              memory of all processes of a kind together, with a shared page divided by those who share it
pss_mib_per_rank     the same of a rank, its worker of Ray and the process that it was forked from
requests_per_minute  requests to the store while the run trains
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import memory
import synthetic

common.sys.path.insert(0, str(common.ROOT / "tests"))

from helpers.s3.proxy import Proxy  # noqa: E402
from helpers.s3.server import store_of  # noqa: E402

from eagleray.base.files import read_history  # noqa: E402
from eagleray.cluster.spares import NAME  # noqa: E402
from eagleray.runs import layout  # noqa: E402
from eagleray.runs.run_store import run_store  # noqa: E402

RECIPE = "mocov3_vitxs8_cifar10_ep2"
OUT = "s3://runs/many"
KINDS = (NAME, "eagleray-spare", "ray::RayTrainWorker")  # each rank has one process of each kind
LIMIT = 1800.0  # seconds to the first step


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=3, help="for which requests are counted")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, store_of((scratch := Path(name)) / "s3", "runs") as store:
        synthetic.write(scratch / "train", images=256, width=32, height=32, each=64)
        with Proxy(store.port) as proxy:
            common.show(measure(proxy, scratch, args.ranks, args.minutes), as_json=args.json)


def measure(proxy: Proxy, scratch: Path, ranks: int, minutes: float) -> dict[str, object]:
    keys = [f"data.train={scratch / 'train'}", f"out={OUT}", f"workers={ranks}", "gpus=false", "data.workers=0"]
    keys += ["optim.batch=96", "data.lanes=48", "optim.epochs=100000", "log_steps=1", "evaluate.probe_epochs=0"]
    env = os.environ | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "XDG_CACHE_HOME": str(scratch / "cache")}
    env |= {"PYTHONPATH": str(common.ROOT / "platform"), "MLFLOW_TRACKING_URI": f"sqlite:///{scratch}/mlflow.db"}
    began, log = time.monotonic(), scratch / "log"
    with log.open("w") as out:
        command = [sys.executable, "-m", "eagleray.cli", "pretrain", RECIPE, *keys]
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        while not read_history(run_store(OUT).fetch() / layout.METRICS):
            if process.poll() is not None or time.monotonic() > began + LIMIT:
                sys.exit(f"no step: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        first = time.monotonic() - began
        before, counted = proxy.requests.total(), time.monotonic()
        time.sleep(60 * minutes)
        made, passed = proxy.requests.total() - before, (time.monotonic() - counted) / 60
        pss = {k: sum(m.pss for m in each) for k, each in memory.below(process.pid, kind).items()}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return {
        "ranks": ranks,
        "first_step_s": first,
        "pss_mib": {name: round(mib) for name, mib in sorted(pss.items())},
        "pss_mib_per_rank": sum(pss[name] for name in KINDS) / ranks,
        "requests_per_minute": made / passed,
    }


def kind(name: str, command: list[str]) -> str:
    """Return the kind of a process."""
    return next((k for k in KINDS if k in (name, *command)), "others")


if __name__ == "__main__":
    common.run(main)
