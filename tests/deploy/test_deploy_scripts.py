"""The shell scripts of deploy/, run: with stubs for the cloud and Slurm, and a real Ray and MLflow."""

import base64
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import mlflow_server, read_only
from helpers.deploy import DEPLOY, TOOLS
from helpers.s3.server import free_block

STUB = "#!/usr/bin/env bash\n"


@pytest.fixture
def bench(tmp_path: Path) -> dict[str, str]:
    """An environment of our own, with bin/ first on the path."""
    (tmp_path / "bin").mkdir()
    path = f"{tmp_path / 'bin'}:{TOOLS}:/usr/local/bin:/usr/bin:/bin"
    kept = {k: os.environ[k] for k in ("OMP_NUM_THREADS", "PYTHONPATH") if k in os.environ}
    return {"PATH": path, "HOME": str(tmp_path), **kept}


def stub(env: dict[str, str], name: str, text: str) -> None:
    path = Path(env["PATH"].split(":")[0]) / name
    path.write_text(STUB + text)
    path.chmod(0o755)


class Cloud(http.server.BaseHTTPRequestHandler):
    """The metadata service of a spot machine: quiet at first, then the notice."""

    kind = "aws"
    asked = 0

    def do_PUT(self) -> None:
        self.answer(b"a-token" if self.kind == "aws" else None)

    def do_GET(self) -> None:
        type(self).asked += 1
        due = self.asked > 1
        if self.kind == "aws":
            assert self.headers["X-aws-ec2-metadata-token"] == "a-token"
            self.answer(b'{"action": "terminate"}' if due else None)
        else:
            assert self.headers["Metadata-Flavor"] == "Google"
            self.answer(b"TRUE" if due else b"FALSE")

    def answer(self, body: bytes | None) -> None:
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def cloud(kind: str) -> Iterator[str]:
    handler = type("Kind", (Cloud,), {"kind": kind})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


@pytest.mark.parametrize(("kind", "seconds"), [("aws", "110"), ("gcp", "25")])
def test_a_spot_notice_drains_the_node(bench: dict[str, str], tmp_path: Path, kind: str, seconds: str):
    stub(bench, "ray", f'echo "$RAY_ADDRESS $*" > {tmp_path}/told\n')
    stub(bench, "sleep", "exec /bin/sleep 0.1\n")
    with cloud(kind) as place:
        env = {**bench, "METADATA": place}
        subprocess.run([DEPLOY / "spot.sh", "10.0.0.5:6379"], env=env, check=True, timeout=60, capture_output=True)
    told = (tmp_path / "told").read_text()
    assert told.startswith("10.0.0.5:6379 drain-node --address 10.0.0.5:6379 --reason DRAIN_NODE_REASON_PREEMPTION")
    assert told.split()[-2:] == ["--deadline-remaining-seconds", seconds]


def test_a_machine_starts_ray_with_its_secrets(bench: dict[str, str], tmp_path: Path):
    (tmp_path / ".eagleray.env").write_text("MLFLOW_TRACKING_PASSWORD=with space\n")
    stub(bench, "ray", f'echo "$MLFLOW_TRACKING_PASSWORD $MLFLOW_TRACKING_URI $*" >> {tmp_path}/told\n')
    stub(bench, "hostname", "echo 10.0.0.5 172.17.0.1\n")
    stub(bench, "serve.sh", f'echo "$MLFLOW_HOST" > {tmp_path}/mlflow\n')
    stub(bench, "spot.sh", f'echo "$1" > {tmp_path}/spot\n')
    for role, env in ("head", bench), ("worker", {**bench, "RAY_HEAD_IP": "10.0.0.5"}):
        subprocess.run([DEPLOY / "node.sh", role], env=env, check=True, timeout=60)
    head, worker = (tmp_path / "told").read_text().splitlines()
    assert head.startswith("with space http://10.0.0.5:5000 start --head --num-cpus=0 --num-gpus=0")
    assert "--dashboard-host=127.0.0.1" in head
    assert "start --address=10.0.0.5:6379" in worker
    for name, told in ("mlflow", "10.0.0.5\n"), ("spot", "10.0.0.5:6379\n"):
        wait_until(lambda n=name, t=told: (tmp_path / n).exists() and (tmp_path / n).read_text() == t, 60)


def test_a_second_start_ends_what_the_first_left(bench: dict[str, str], tmp_path: Path):
    """And nothing else: not a process that has its number by chance."""
    stub(bench, "ray", "")
    stub(
        bench, "serve.sh", 'echo "$MLFLOW_TRACKING_PASSWORD $$" >> $HOME/served\n/bin/sleep 500 & exec /bin/sleep 500\n'
    )

    def served() -> list[list[str]]:
        return [line.split() for line in (tmp_path / "served").read_text().splitlines()]

    def alive(pid: str) -> bool:
        done = subprocess.run(["/bin/ps", "-o", "stat=", "-g", pid], capture_output=True, text=True)
        return any(not line.startswith("Z") for line in done.stdout.split())

    try:
        for password, count in ("old", 1), ("new", 2):
            (tmp_path / ".eagleray.env").write_text(f"MLFLOW_TRACKING_PASSWORD={password}\n")
            subprocess.run([DEPLOY / "node.sh", "head"], env=bench, check=True, timeout=60)
            wait_until(lambda n=count: (tmp_path / "served").exists() and len(served()) == n, 60)
        (old, first), (new, second) = served()
        assert (old, new) == ("old", "new")
        wait_until(lambda: not alive(first), 60)  # also what it had started, each of 500 s
        assert alive(second)
        number, began = (tmp_path / "serve.sh.pid").read_text().split()
        assert number == second
        (tmp_path / "serve.sh.pid").write_text(f"{number} {int(began) + 1}\n")
        subprocess.run([DEPLOY / "node.sh", "head"], env=bench, check=True, timeout=60)
        wait_until(lambda: len(served()) == 3, 60)
        assert alive(second)
    finally:
        for _, pid in served():
            if alive(pid):
                os.killpg(int(pid), signal.SIGKILL)


VALUES = {
    "SOME_URI": "postgresql+psycopg://u:p@h/db?sslmode=require&connect_timeout=10",
    "MLFLOW_TRACKING_PASSWORD": "pa$HOME$$word`touch pwned`$(touch pwned)",
    "SOME_KEY": "horse;touch pwned (a b) 'c \"d",
    "MLFLOW_TRACKING_URI": "http://elsewhere",
    "EMPTY": "",
}


def test_settings_are_read_and_not_executed(bench: dict[str, str], tmp_path: Path):
    lines = ["# a comment", "", *(f"{name}={value}" for name, value in VALUES.items()), "  # another"]
    (tmp_path / ".eagleray.env").write_text("\r\n".join(lines))
    stub(bench, "ray", f"env -0 > {tmp_path}/seen\n")
    subprocess.run([DEPLOY / "node.sh", "head"], env=bench, check=True, timeout=60, cwd=tmp_path)
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().split("\0") if line)
    assert {name: seen[name] for name in VALUES} == VALUES
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("role", ["head", "worker"])
def test_ray_is_not_given_what_the_server_of_mlflow_alone_needs(bench: dict[str, str], tmp_path: Path, role: str):
    names = ["ADMIN_USERNAME", "ADMIN_PASSWORD", "AUTH_DATABASE_URI", "BACKEND_STORE_URI", "FLASK_SERVER_SECRET_KEY"]
    (tmp_path / ".eagleray.env").write_text("".join(f"MLFLOW_{n}=a-secret\n" for n in names) + "A=1\n")
    stub(bench, "ray", f"env > {tmp_path}/ray\n")
    stub(bench, "serve.sh", f"env > {tmp_path}/serve.part; mv {tmp_path}/serve.part {tmp_path}/serve\n")
    stub(bench, "spot.sh", "")
    env = {**bench, "RAY_HEAD_IP": "10.0.0.5"}
    subprocess.run([DEPLOY / "node.sh", role], env=env, check=True, timeout=60, cwd=tmp_path)
    assert "A=1" in (tmp_path / "ray").read_text()
    assert "a-secret" not in (tmp_path / "ray").read_text()
    if role == "head":
        wait_until(lambda: (tmp_path / "serve").exists(), 60)
        assert (tmp_path / "serve").read_text().count("a-secret") == len(names)


def test_a_line_that_is_no_setting_is_named_and_not_repeated(bench: dict[str, str], tmp_path: Path):
    (tmp_path / ".eagleray.env").write_text("A=1\nexport PASSWORD=hidden\n")
    done = subprocess.run([DEPLOY / "node.sh", "head"], env=bench, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "node.sh: line 2 of ~/.eagleray.env: expected NAME=value\n")


def wait_until(done: object, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end, "took too long"
        time.sleep(0.2)


def test_scripts_name_what_is_wrong(bench: dict[str, str]):
    def said(*command: str, **env: str) -> tuple[int, str]:
        given = {**bench, **env}
        done = subprocess.run(
            [DEPLOY / command[0], *command[1:]], env=given, capture_output=True, text=True, timeout=60
        )
        [line] = done.stderr.splitlines()
        return done.returncode, line

    Path(bench["HOME"], ".eagleray.env").touch()
    assert said("node.sh", "boss") == (2, "node.sh: got 'boss', expected head or worker")
    status, line = said("mlflow/serve.sh", MLFLOW_BACKEND_STORE_URI="sqlite:////x")
    assert status
    assert "MLFLOW_ARTIFACTS_DESTINATION: expected" in line
    given = {f"MLFLOW_{name}": "x" for name in ("BACKEND_STORE_URI", "ARTIFACTS_DESTINATION", "AUTH_DATABASE_URI")}
    given |= {"MLFLOW_TRACKING_USERNAME": "one", "MLFLOW_TRACKING_PASSWORD": "x", "MLFLOW_FLASK_SERVER_SECRET_KEY": "x"}
    status, line = said("mlflow/serve.sh", **given)  # nobody is administrator by omission
    assert status
    assert "MLFLOW_ADMIN_USERNAME: expected the name of the administrator" in line
    status, line = said("mlflow/serve.sh", **given, MLFLOW_ADMIN_USERNAME="two")
    assert status
    assert "MLFLOW_ADMIN_PASSWORD: expected" in line
    line = "serve.sh: MLFLOW_ADMIN_USERNAME: expected another name than that of MLFLOW_TRACKING_USERNAME"
    assert said("mlflow/serve.sh", **given, MLFLOW_ADMIN_USERNAME="one", MLFLOW_ADMIN_PASSWORD="y") == (2, line)
    assert said("store.sh") == (2, "store.sh: got '', expected accounts or rights")
    keys = {"ROOT_ACCESS_KEY_ID": "a", "JOBS_ACCESS_KEY_ID": "a", "MLFLOW_ACCESS_KEY_ID": "b"}
    status, line = said("store.sh", "accounts", **keys)
    assert (status, line[:58]) == (2, "store.sh: expected three names for the keys of the store: ")
    status, line = said("slurm/eagleray.sbatch")
    assert (status, line[:22]) == (2, "error: nothing to run;")
    assert said("slurm/eagleray.sbatch", "pretrain") == (2, "error: no Slurm allocation; start it with sbatch")
    status, line = said("slurm/eagleray.sbatch", "pretrain", PATH="/usr/bin:/bin", SLURM_JOB_ID="1")
    assert (status, line[:35]) == (2, "error: eagleray is not on PATH; act")


def ask(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code
    except OSError:
        return 0


@contextmanager
def serving(env: dict[str, str], log: Path, *prefix: str) -> Iterator[str]:
    """The URL of serve.sh's server, once it answers; `prefix` comes before the command."""
    port = free_block(1)
    env = {
        "MLFLOW_PORT": str(port),
        "MLFLOW_WORKERS": "1",
        "MLFLOW_TRACKING_USERNAME": "someone",
        "MLFLOW_TRACKING_PASSWORD": "not-to-be-seen-1",
        "MLFLOW_ADMIN_USERNAME": "keeper",
        "MLFLOW_ADMIN_PASSWORD": "not-to-be-seen-3",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "not-to-be-seen-2",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **env,
    }
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        command = [*prefix, DEPLOY / "mlflow/serve.sh"]
        server = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until(lambda: server.poll() is not None or ask(f"{url}/health") == 200, 300)
        assert server.poll() is None, log.read_text()
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


class Policies(http.server.BaseHTTPRequestHandler):
    """A store that keeps the policies of its buckets."""

    kept: dict[str, dict[str, Any]]

    def do_PUT(self) -> None:
        assert "Credential=root/" in self.headers["Authorization"]
        self.kept[self.path] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_jobs_and_the_server_of_mlflow_have_a_bucket_each(bench: dict[str, str], tmp_path: Path):
    keys = {"ROOT_ACCESS_KEY_ID": "root", "JOBS_ACCESS_KEY_ID": "jobs", "MLFLOW_ACCESS_KEY_ID": "server"}
    secrets = {"JOBS_SECRET_ACCESS_KEY": 'with "quotes" and $', "MLFLOW_SECRET_ACCESS_KEY": "other"}
    (tmp_path / "accounts").mkdir()
    places = {"DATA": str(tmp_path / "data"), "ACCOUNTS": str(tmp_path / "accounts")}
    for _ in range(2):
        env = bench | keys | secrets | places
        subprocess.run([DEPLOY / "store.sh", "accounts"], env=env, check=True, timeout=60)
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["eagleray", "mlflow"]
    users = tmp_path / "accounts" / "users.json"
    assert users.stat().st_mode & 0o777 == 0o600
    accounts = json.loads(users.read_text())["accessAccounts"]
    assert {k: (a["access"], a["secret"], a["role"]) for k, a in accounts.items()} == {
        "jobs": ("jobs", 'with "quotes" and $', "user"),
        "server": ("server", "other", "user"),
    }
    handler = type("Kind", (Policies,), {"kept": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = bench | keys | {"ROOT_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    env |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_EC2_METADATA_DISABLED": "true"}
    subprocess.run([DEPLOY / "store.sh", "rights"], env=env, check=True, timeout=120)
    server.shutdown()
    for bucket, user in ("eagleray", "jobs"), ("mlflow", "server"):
        objects, whole = handler.kept.pop(f"/{bucket}?policy")["Statement"]  # type: ignore[attr-defined]
        assert {s["Effect"] for s in (objects, whole)} == {"Allow"}
        assert objects["Principal"] == whole["Principal"] == {"AWS": [user]}
        assert (objects["Resource"], whole["Resource"]) == ([f"arn:aws:s3:::{bucket}/*"], [f"arn:aws:s3:::{bucket}"])
        assert {a for a in objects["Action"] if "Delete" in a} == {"s3:DeleteObject"}
        assert whole["Action"] == ["s3:ListBucket", "s3:ListBucketMultipartUploads"]
    assert not handler.kept  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_mlflow_asks_for_the_password_of_the_environment(bench: dict[str, str], tmp_path: Path):
    env = {
        **bench,
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/m.db",
        "MLFLOW_AUTH_DATABASE_URI": f"sqlite:///{tmp_path}/users%d.db",
        "MLFLOW_ARTIFACTS_DESTINATION": str(tmp_path / "files"),
    }
    with serving(env, tmp_path / "log") as url:
        search = f"{url}/api/2.0/mlflow/experiments/search?max_results=1"
        wrong = "Basic " + base64.b64encode(b"someone:else").decode()
        assert ask(search) == 401
        assert ask(search, Authorization=wrong) == 401
        assert ask(search, Authorization=RIGHT) == 200
        assert ask(search, Authorization=RIGHT, Host="evil.example.com") == 403
        other = f"{url}/api/2.0/mlflow/users/get?username=keeper"
        keeper = "Basic " + base64.b64encode(b"keeper:not-to-be-seen-3").decode()
        assert ask(other, Authorization=RIGHT) == 403
        assert ask(other, Authorization=keeper) == 200
        table = shown()
        assert url.rpartition(":")[2] in table
        assert "not-to-be-seen" not in table + (tmp_path / "log").read_text()
        assert (tmp_path / "users%d.db").exists()
    changed = {"MLFLOW_TRACKING_PASSWORD": "not-to-be-seen-4", "MLFLOW_ADMIN_PASSWORD": "not-to-be-seen-5"}
    with serving(env | changed, tmp_path / "log") as url:
        search = f"{url}/api/2.0/mlflow/experiments/search?max_results=1"
        for user, old, new in ("someone", 1, 4), ("keeper", 3, 5):
            for number, status in (old, 401), (new, 200):
                password = base64.b64encode(f"{user}:not-to-be-seen-{number}".encode()).decode()
                assert ask(search, Authorization=f"Basic {password}") == status, user


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_mlflow_of_compose_starts_on_postgresql(bench: dict[str, str], tmp_path: Path):
    """The server, the driver and the URLs of compose.yaml, on a real PostgreSQL that asks for a password. As there, the
    server can write to /tmp alone."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["mlflow"]
    confined = service["read_only"] and read_only.possible()
    prefix = read_only.command(tmp_path, ["/tmp"]) if confined else []
    with mlflow_server.postgres() as database:
        rest = database.partition("://")[2]
        env = {**bench, "MLFLOW_ARTIFACTS_DESTINATION": "/tmp/files" if confined else str(tmp_path / "files")}
        for key in ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_AUTH_DATABASE_URI"):
            env[key] = service["environment"][key].partition("://")[0] + "://" + rest
        with serving(env, tmp_path / "log", *prefix) as url:
            client = [sys.executable, "-c", RUN, url]
            password = {"MLFLOW_TRACKING_USERNAME": "someone", "MLFLOW_TRACKING_PASSWORD": "not-to-be-seen-1"}
            done = subprocess.run(client, env=bench | password, capture_output=True, text=True, timeout=200)
            assert done.stdout.split() == ["3", "0.25", "there"], done.stderr
        assert mlflow_server.PASSWORD not in shown() + (tmp_path / "log").read_text()


# A run with a metric, a tag and a file, read back from the server.
RUN = """
import sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
run = client.create_run(client.create_experiment("first"), tags={"kind": "test"})
client.log_metric(run.info.run_id, "loss", 0.25, step=3)
client.log_text(run.info.run_id, "there", "note.txt")
[found] = client.search_runs([run.info.experiment_id], "tags.kind = 'test' and metrics.loss < 1")
[point] = client.get_metric_history(found.info.run_id, "loss")
path = client.download_artifacts(found.info.run_id, "note.txt")
print(point.step, point.value, open(path).read())
"""
RIGHT = "Basic " + base64.b64encode(b"someone:not-to-be-seen-1").decode()


# Slurm without Slurm: a step runs here, and all nodes are this machine.
SRUN = """
while [ "$1" != bash ]; do shift; done
set -m
"$@" --object-store-memory=100000000 & step=$!
trap 'kill -TERM -- -$step' TERM
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
"""


@contextmanager
def batch(env: dict[str, str], log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as out:
        job = subprocess.Popen(
            [DEPLOY / "slurm/eagleray.sbatch", *command], env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()  # it ends Ray, whose steps are in process groups of their own
            job.wait(300)


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (2, False), (1, False), (0, False)])
def test_slurm_starts_a_run_again_whose_store_stayed_away(
    bench: dict[str, str], tmp_path: Path, free_job: int, status: int, requeued: bool
):
    stub(bench, "srun", "exec /bin/sleep 60\n")
    stub(bench, "ray", "echo ' 1 node_a'\n")  # `ray status`
    stub(bench, "hostname", "echo 127.0.0.1\n")
    stub(bench, "scontrol", f'[ "$1" = show ] && echo one || echo "$*" > {tmp_path}/queue\n')
    stub(bench, "eagleray", f"until [ -e {tmp_path}/naps ]; do /bin/sleep 0.1; done; exit {status}\n")
    stub(bench, "sleep", f'echo $$ >> {tmp_path}/naps\nexec /bin/sleep "$@"\n')
    env = {**bench, "SLURM_JOB_ID": str(free_job), "SLURM_JOB_NODELIST": "one", "SLURM_SUBMIT_DIR": str(tmp_path)}
    head = socket.create_server(("127.0.0.1", 20000 + free_job * 10))
    with head, batch(env, tmp_path / "log", "pretrain") as job:
        assert job.wait(60) == status, (tmp_path / "log").read_text()
    naps = (tmp_path / "naps").read_text().split()
    wait_until(lambda: not any(Path(f"/proc/{nap}").exists() for nap in naps), 30)  # each of 60 s
    assert (tmp_path / "queue").exists() is requeued


# Ray has two nodes until the run begins; then one is gone, and something waits for it, or nothing does.
LOST_NODE = """
echo asked >> $PLACE/asked
echo ' 1 node_a'
if [ -e $PLACE/began ]; then echo "$WAITS"; else echo ' 1 node_b'; fi
"""
# A command without a handler of its own, as most are: an interrupt ends it, or Ray having been asked for long.
RUNNING = """
import pathlib, sys, time
asked = pathlib.Path(sys.argv[1]) / "asked"
def times():
    return len(asked.read_text().split())
first = times()  # while this program started, which may take as long as it likes
(asked.parent / "began").touch()
try:
    while times() < first + 40:
        time.sleep(0.05)
except KeyboardInterrupt:
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("waits", "requeued"),
    [(" {'GPU': 1.0} * 32 (PACK): 1+ pending placement groups", True), (" (no resource demands)", False)],
)
def test_slurm_gives_a_job_back_that_waits_for_a_lost_node(
    bench: dict[str, str], tmp_path: Path, free_job: int, waits: str, requeued: bool
):
    """And not one with fewer workers, which goes on."""
    stub(bench, "srun", "exec /bin/sleep 60\n")
    stub(bench, "ray", LOST_NODE)
    stub(bench, "sleep", "exec /bin/sleep 0.05\n")
    stub(bench, "hostname", "echo 127.0.0.1\n")
    stub(bench, "scontrol", f'[ "$1" = show ] && printf "one\\ntwo\\n" || echo "$*" > {tmp_path}/queue\n')
    (tmp_path / "run.py").write_text(RUNNING)
    stub(bench, "eagleray", f"exec {sys.executable} {tmp_path}/run.py {tmp_path}\n")
    env = {**bench, "SLURM_JOB_ID": str(free_job), "SLURM_JOB_NODELIST": "one,two", "SLURM_SUBMIT_DIR": str(tmp_path)}
    head = socket.create_server(("127.0.0.1", 20000 + free_job * 10), backlog=1000)  # nobody takes what it is asked
    with head, batch(env | {"PLACE": str(tmp_path), "WAITS": waits}, tmp_path / "log", "pretrain") as job:
        assert job.wait(400) == int(requeued), (tmp_path / "log").read_text()
    assert (tmp_path / "queue").exists() is requeued
    assert ("a node is gone" in (tmp_path / "log").read_text()) is requeued


def slurm_with_stubs(bench: dict[str, str], tmp_path: Path, job: int) -> dict[str, str]:
    """An environment in which a step runs here, and Ray only notes how open its folder is."""
    stub(bench, "srun", SRUN)
    stub(
        bench,
        "ray",
        f'[ "$1" = status ] && exec echo " 1 node_a"\ntouch "$RAY_TMPDIR/a"\n'
        # The job ends as soon as the file is there, and Ray with it: so the file appears whole.
        f'stat -c "%a %n" "$RAY_TMPDIR" > {tmp_path}/telling\nmv {tmp_path}/telling {tmp_path}/told\n'
        "exec /bin/sleep 60\n",
    )
    stub(bench, "hostname", "echo 127.0.0.1\n")
    stub(bench, "scontrol", "echo one\n")
    stub(bench, "eagleray", f"until [ -e {tmp_path}/told ]; do /bin/sleep 0.1; done\n")
    return {**bench, "SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "one", "SLURM_SUBMIT_DIR": str(tmp_path)}


@pytest.mark.parametrize("left", [False, True])
def test_the_folder_of_ray_on_a_node_is_private_and_goes_with_the_job(
    bench: dict[str, str], tmp_path: Path, free_job: int, left: bool
):
    folder = Path(f"/tmp/ray-{free_job}")
    if left:  # by an earlier start of the job, that was killed
        folder.mkdir(mode=0o755)
    env, head = slurm_with_stubs(bench, tmp_path, free_job), socket.create_server(("127.0.0.1", 20000 + free_job * 10))
    with head, batch(env, tmp_path / "log", "pretrain") as job:
        assert job.wait(60) == 0, (tmp_path / "log").read_text()
    wait_until(lambda: (tmp_path / "told").read_text() == f"700 {folder}\n", 60)
    wait_until(lambda: not folder.exists(), 120)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_the_folder_of_another_user_is_not_taken_for_that_of_ray(bench: dict[str, str], tmp_path: Path, free_job: int):
    folder = Path(f"/tmp/ray-{free_job}")
    folder.mkdir()
    try:
        os.chown(folder, 65534, 65534)
        with batch(slurm_with_stubs(bench, tmp_path, free_job), tmp_path / "log", "pretrain") as job:
            assert job.wait(60) == 2
        lines = (tmp_path / "log").read_text().splitlines()
        assert lines[0] == f"error: 127.0.0.1: {folder} is there, and belongs to another user"
        assert not (tmp_path / "told").exists()
        assert folder.exists()
    finally:
        folder.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_slurm_job_is_saved_requeued_and_continued(
    bench: dict[str, str], small: Path, shards: Path, tmp_path: Path, free_job: int
):
    stub(bench, "srun", SRUN)
    stub(bench, "scontrol", f'[ "$1" = show ] && printf "one\\ntwo\\n" || echo "$*" > {tmp_path}/queue\n')
    env = {
        **bench,
        "SLURM_JOB_ID": str(free_job),
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_CPUS_PER_TASK": "1",
    }
    out = tmp_path / "out"
    command = ["pretrain", str(small), f"data.train={shards / 'train'}", f"out={out}", "workers=2", "optim.epochs=60"]
    command += ["evaluate.probe_epochs=0"]
    metrics = out / "metrics.jsonl"
    with batch(env, tmp_path / "first.log", *command) as job:  # starting takes a minute or two on two cores
        wait_until(
            lambda: job.poll() is not None or (metrics.exists() and len(metrics.read_text().splitlines()) > 3), 700
        )
        assert job.poll() is None, (tmp_path / "first.log").read_text()
        [state] = tmp_path.glob(".eagleray-*")
        assert (state / "token").stat().st_mode & 0o777 == 0o600
        token = (state / "token").read_text()
        table = shown()
        assert len(token) == 64
        assert token not in table
        job.send_signal(signal.SIGUSR1)
        assert job.wait(300) == 1
    wait_until(lambda: f"/ray-{free_job}/" not in shown(), 200)  # as Slurm does before it starts the job again
    text = (tmp_path / "first.log").read_text()
    assert "Ray has 2 node(s)" in text
    assert (tmp_path / "queue").read_text().split() == ["requeue", str(free_job)]
    assert not state.exists()
    assert list((out / "checkpoints").glob("*.json"))
    taken = json.loads(metrics.read_text().splitlines()[-1])["step"]
    with batch(env, tmp_path / "second.log", *command, f"max_steps={taken + 5}") as job:
        assert job.wait(700) == 0, (tmp_path / "second.log").read_text()
    assert "continuing from step" in (tmp_path / "second.log").read_text() + (out / "train.log").read_text()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, taken + 6))
    wait_until(lambda: f"/ray-{free_job}/" not in shown(), 200)
    wait_until(lambda: not Path(f"/tmp/ray-{free_job}").exists(), 60)


def shown() -> str:
    """Command lines of all processes."""
    return subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def free_job() -> int:
    """A job number whose ports nobody uses."""
    for job in range(os.getpid() % 900, 1000):
        if Path(f"/tmp/ray-{job}").exists():  # of tests that were killed
            continue
        try:
            for port in range(20000 + job * 10, 20003 + job * 10):
                with socket.socket() as s:
                    s.bind(("", port))
            return job
        except OSError:
            continue
    raise AssertionError("no free ports")
