"""What deploy/ promises: valid for the tools that read it, nothing open to the world, no secret inside."""

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.deploy import DEPLOY, compose, dockerfile, exported, kuberay, load, ray_up, script

ROOT = Path(__file__).parents[2]
SCRIPTS = [DEPLOY / name for name in ("node.sh", "spot.sh", "store.sh", "mlflow/serve.sh", "slurm/eagleray.sbatch")]
FILES = [f for f in sorted(DEPLOY.rglob("*")) if f.is_file() and "grafana" not in f.parts]
SECRET = re.compile(
    r"(?i)(?<!http)(password|passwd|secret|token|access_key)[a-z_]*[\"']?[ =:]*[=:][ \"']*\w[^\s\"'$}]{7,}"
)
KEYS = re.compile(r"AKIA[0-9A-Z]{12,}|BEGIN [A-Z ]*PRIVATE KEY|gh[pousr]_[A-Za-z0-9]{20,}|eyJ[A-Za-z0-9_-]{20,}")


def test_cluster_launcher_files_are_valid():
    assert ray_up(load("aws.yaml")) == []
    assert ray_up(load("gcp.yaml")) == []


def test_kuberay_manifests_are_valid():
    cluster, job = load("kuberay/raycluster.yaml"), load("kuberay/rayjob.yaml")
    assert kuberay(cluster) == []
    assert kuberay(job) == []
    assert cluster["spec"].pop("gcsFaultToleranceOptions")["redisAddress"] == "eagleray-redis:6379"
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]  # a job that failed gets a new cluster


def test_a_job_asks_for_gpus():
    """Its cluster begins without a worker, so nothing but the recipe says what it needs."""
    from eagleray.cluster.ray_train import resources
    from eagleray.runs import recipe

    spec = load("kuberay/rayjob.yaml")["spec"]
    program, command, name, *keys = spec["entrypoint"].split()
    assert (program, command) == ("eagleray", "pretrain")
    [worker] = spec["rayClusterSpec"]["workerGroupSpecs"]
    gpu, cpus = resources(recipe.load(name, keys), [{"memory": 1.0}])
    assert gpu
    assert 0 < cpus <= int(worker["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])


def test_the_patch_for_efa_fits_the_cluster():
    kustomization, cluster = load("kuberay/kustomization.yaml"), load("kuberay/raycluster.yaml")
    [patch] = kustomization["patches"]
    assert patch["target"] == {"kind": cluster["kind"], "name": cluster["metadata"]["name"]}
    assert all((DEPLOY / "kuberay" / name).exists() for name in kustomization["resources"])
    apply(patch["path"], cluster)
    assert kuberay(cluster) == []
    [container] = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "1"


def apply(name: str, whole: Any) -> None:
    """Apply a JSON patch, as kubectl does: what is replaced or removed is there."""
    for operation in load(f"kuberay/{name}"):
        *way, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        place: Any = whole
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if operation["op"] != "add":
            del place[last]
        if operation["op"] != "remove":
            place.insert(len(place), operation["value"]) if last == "-" else place.update({last: operation["value"]})


def test_kueue_admits_a_job():
    """Its documentation asks for a queue, and for a cluster that goes with the job and does not scale."""
    job = load("kuberay/rayjob.yaml")
    apply("kueue.yaml", job)
    assert kuberay(job) == ["does not scale"]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "REPLACE_QUEUE"}
    assert job["spec"]["suspend"]
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert not job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"]
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    [container] = group["template"]["spec"]["containers"]
    [workers] = re.findall(r"workers=(\d+)", job["spec"]["entrypoint"])
    assert group["replicas"] * int(container["resources"]["requests"]["nvidia.com/gpu"]) == int(workers)


def commands_of_kubectl() -> list[str]:
    """Those of the page on clusters, which kubectl can run without a cluster."""
    text = (ROOT / "docs/cluster.md").read_text().replace("\\\n", " ")
    return re.findall(r"^(kubectl (?:create secret|patch --local) .*?)(?: \|)?$", text, re.M)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_makes_of_the_files_what_we_say(tmp_path: Path):
    def kubectl(command: str) -> list[Any]:
        done = subprocess.run(["bash", "-ec", command], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return list(yaml.safe_load_all(done.stdout))

    env = {**os.environ, "HOME": str(tmp_path)}
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker/config.json").write_text("{}")
    (tmp_path / ".eagleray.env").write_text("AWS_DEFAULT_REGION=here\nMLFLOW_ADMIN_PASSWORD=no\nPOSTGRES_PASSWORD=no\n")
    *secrets, patch = commands_of_kubectl()
    made = [kubectl(f"{command} --dry-run=client -o yaml")[0] for command in secrets]
    keys = {one["metadata"]["name"]: set(one["data"]) for one in made}
    assert keys == {
        "eagleray-env": {"AWS_DEFAULT_REGION"},
        "eagleray-redis": {"password"},
        "eagleray-registry": {".dockerconfigjson"},
    }
    job, cluster = load("kuberay/rayjob.yaml"), load("kuberay/raycluster.yaml")
    assert {name for _, each in leaves(job, "imagePullSecrets") for name in each.values()} <= keys.keys()
    apply("kueue.yaml", job)
    assert kubectl(patch) == [job]
    apply("efa.yaml", cluster)
    assert [one for one in kubectl("kubectl kustomize deploy/kuberay") if one["kind"] == "RayCluster"] == [cluster]


def test_the_store_of_a_heads_state_is_valid():
    import kubernetes_validate

    service, redis = yaml.safe_load_all((DEPLOY / "kuberay/redis.yaml").read_text())
    for each in (service, redis):
        kubernetes_validate.validate(each, "1.33", strict=True)
    options = load("kuberay/raycluster.yaml")["spec"]["gcsFaultToleranceOptions"]
    [port] = service["spec"]["ports"]
    assert options["redisAddress"] == f"{service['metadata']['name']}:{port['port']}"
    [container] = redis["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["valueFrom"] == options["redisPassword"]["valueFrom"]
    assert redis["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


def test_only_the_cluster_reaches_the_cluster():
    import kubernetes_validate

    policies = list(yaml.safe_load_all((DEPLOY / "kuberay/network.yaml").read_text()))
    for each in policies:
        kubernetes_validate.validate(each, "1.33", strict=True)
    cluster, redis = (
        load("kuberay/raycluster.yaml"),
        list(yaml.safe_load_all((DEPLOY / "kuberay/redis.yaml").read_text())),
    )
    pods = {"matchLabels": {"ray.io/cluster": cluster["metadata"]["name"]}}  # KubeRay labels them so
    stored = {"matchLabels": redis[1]["spec"]["template"]["metadata"]["labels"]}
    assert [p["spec"]["podSelector"] for p in policies] == [pods, stored]
    assert all(p["spec"]["policyTypes"] == ["Ingress"] for p in policies)
    assert [p["spec"]["ingress"][0]["from"] for p in policies] == [[{"podSelector": pods}]] * 2
    metrics = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"port": next(p["containerPort"] for p in metrics if p["name"] == "metrics")} in [
        port for rule in policies[0]["spec"]["ingress"][1:] for port in rule["ports"]
    ]


def test_alerts_ask_for_what_there_is():
    reporter = pytest.importorskip("ray.dashboard.modules.reporter.reporter_agent")
    known = exported() | {f"ray_{name}" for name in reporter.METRICS_GAUGES}
    [group] = load("prometheus/alerts.yaml")["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        asked = set(re.findall(r"\bray_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= known, asked - known
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "action"}
        labels = {"run", "kind"} if "eagleray" in rule["expr"].split(" and ")[0] else {"instance"}
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
    prometheus = yaml.safe_load(load("compose.yaml")["configs"]["prometheus"]["content"])
    assert prometheus["rule_files"] == ["/alerts/*.yaml"]


def test_image_and_constraints_have_one_python():
    [image] = re.findall(r"^FROM python:(3\.\d+)\.\d+-slim", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert f"(Python {image}, " in (ROOT / "constraints.txt").read_text().splitlines()[0]
    requires = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert requires
    assert requires[1] == image


def test_compose_files_are_valid():
    base, gpu = load("compose.yaml"), load("compose.gpu.yaml")
    assert compose(base) == []
    assert set(gpu["services"]) <= set(base["services"])
    assert [d["driver"] for _, d in leaves(gpu, "devices")] == ["nvidia"]
    given = set(re.findall(r"^#?(\w+)=", (DEPLOY / "eagleray.env.example").read_text(), re.M))
    assert set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text())) <= given


def test_jobs_have_no_key_but_their_own():
    """The root key of the store is that of the store and of the service that gives the others their rights."""
    services = load("compose.yaml")["services"]
    holds = {name: set(re.findall(r"\$\{(\w+)", str(s.get("environment", {})))) for name, s in services.items()}
    assert {name for name, keys in holds.items() if "STORE_ROOT_SECRET_ACCESS_KEY" in keys} == {"store", "rights"}
    assert {name for name, keys in holds.items() if "MLFLOW_SECRET_ACCESS_KEY" in keys} == {"mlflow", "accounts"}
    assert {name for name, keys in holds.items() if "AWS_SECRET_ACCESS_KEY" in keys} == {"ray", "accounts"}
    for name in "ray", "mlflow":
        assert services[name]["depends_on"]["rights"] == {"condition": "service_completed_successfully"}
    assert services["store"]["environment"]["VGW_IAM_DIR"] == "/accounts"


def leaves(value: Any, key: str) -> list[tuple[str, Any]]:
    """What lies under a key anywhere, item by item."""
    if isinstance(value, dict):
        here = [(key, v) for v in value.get(key, [])]
        return here + [x for v in value.values() for x in leaves(v, key)]
    return [x for v in value for x in leaves(v, key)] if isinstance(value, list) else []


def test_dockerfile_is_clean():
    text = (DEPLOY / "Dockerfile").read_text()
    assert dockerfile(text) == []
    copied = {w for line in re.findall(r"^COPY (?!--)(.+)$", text, re.M) for w in line.split()[:-1]}
    assert all((ROOT / c).exists() for c in copied), copied
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert {c.split("/")[0] for c in copied} == set(allowed)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_clean(path: Path):
    assert script(path.read_text()) == []
    assert os.access(path, os.X_OK)


def set_in(*keys: Any, value: Any = None) -> Callable[[Any], None]:
    """A change that sets what lies under keys, or takes it away."""

    def change(config: Any) -> None:
        for key in keys[:-1]:
            config = config[key]
        if value is None:
            del config[keys[-1]]
        else:
            config[keys[-1]] = value

    return change


GPU, HEAD, EFA = (("available_node_types", name) for name in ("gpu", "head", "efa"))
WORKER = ("spec", "workerGroupSpecs", 0, "template", "spec")
BOX = (*WORKER, "containers", 0)
HARM: list[tuple[Callable[[Any], list[str]], str, Callable[[Any], None], str]] = [
    (ray_up, "aws.yaml", set_in(*GPU, "node_config", "InstanceMarketOptions"), "gpu is not on spot"),
    (
        ray_up,
        "aws.yaml",
        set_in(*HEAD, "node_config", "InstanceMarketOptions", value={"MarketType": "spot"}),
        "head is",
    ),
    (ray_up, "aws.yaml", set_in(*GPU, "node_config", "MetadataOptions"), "gpu answers IMDSv1"),
    (ray_up, "aws.yaml", set_in(*HEAD, "node_config", "SecurityGroupIds"), "lets the world in"),
    (ray_up, "aws.yaml", set_in(*HEAD, "resources", value={"CPU": 4}), "workers could run on the head"),
    (ray_up, "aws.yaml", set_in("file_mounts", "/home/ray/.ray/auth_token"), "has no token"),
    (ray_up, "aws.yaml", set_in("head_start_ray_commands", 0, value="ray start --dashboard-host=::"), "opens more"),
    (ray_up, "aws.yaml", set_in("idle_minutes", value=3), "Ray refuses it"),
    (ray_up, "gcp.yaml", set_in(*GPU, "node_config", "scheduling"), "gpu is not on spot"),
    (ray_up, "gcp.yaml", set_in(*GPU, "node_config", "networkInterfaces", 0, "accessConfigs", value=[{}]), "internet"),
    (ray_up, "gcp.yaml", set_in(*GPU, "node_config", "serviceAccounts"), "may do too much"),
    (ray_up, "gcp.yaml", set_in("head_node_type", value="nobody"), "Ray refuses it"),
    (ray_up, "gcp.yaml", set_in("head_setup_commands"), "merges in: pip install google"),
    (ray_up, "aws.yaml", set_in("setup_commands"), "merges in: which ray || pip"),
    (ray_up, "aws.yaml", set_in("docker", "run_options", value=[]), "RDMA"),
    (ray_up, "aws.yaml", set_in(*GPU, "node_config", "InstanceTyp", value="m7i.xlarge"), "InstanceTyp"),
    (
        ray_up,
        "aws.yaml",
        set_in("available_node_types", "efa", "node_config", "NetworkInterfaces", 0, value={}),
        "group",
    ),
    (ray_up, "gcp.yaml", set_in(*GPU, "node_config", "machineTyp", value="x"), "no field machineTyp"),
    (ray_up, "gcp.yaml", set_in(*GPU, "node_config", "scheduling", "provisioningModel", value="CHEAP"), "none of"),
    (kuberay, "kuberay/raycluster.yaml", set_in("spec", "gcsFaultToleranceOptions", "backend", value="x"), "rocksdb"),
    (kuberay, "kuberay/raycluster.yaml", set_in("spec", "authOptions"), "has no token"),
    (kuberay, "kuberay/raycluster.yaml", set_in("spec", "headGroupSpec", "serviceType", value="LoadBalancer"), "opens"),
    (kuberay, "kuberay/raycluster.yaml", set_in("spec", "autoscaler", value={}), "autoscaler"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "resources", "limits", "nvidia.com/gpu"), "has no GPU"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "volumeMounts"), "has no /dev/shm"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "livenessProbe"), "has no livenessProbe"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "volumeMount", value=[]), "volumeMount"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "envFrom"), "has no keys"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*WORKER, "nodeSelector"), "is not on spot"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*WORKER, "imagePullSecrets"), "cannot log in to a registry"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*WORKER, "terminationGracePeriodSeconds", value=60), "drains"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*WORKER, "securityContext", value={"runAsUser": 0}), "as root"),
    (kuberay, "kuberay/rayjob.yaml", set_in("spec", "backofLimit", value=1), "backofLimit"),
    (kuberay, "kuberay/rayjob.yaml", set_in("spec", "backoffLimit", value="three"), "three"),
    (compose, "compose.yaml", set_in("services", "mlflow", "ports", 0, value="5000:5000"), "open to the world"),
    (compose, "compose.yaml", set_in("services", "ray", "ports", 0, value="0.0.0.0:8265:8265"), "open to the world"),
    (compose, "compose.yaml", set_in("services", "postgres", "environment", "POSTGRES_PASSWORD", value="x"), "default"),
    (compose, "compose.yaml", set_in("services", "store", "image", value="versity/versitygw:latest"), "not pinned"),
    (compose, "compose.yaml", set_in("services", "store", "healthcheck"), "has no healthcheck"),
    (compose, "compose.yaml", set_in("services", "postgres", "cap_drop"), "postgres: may gain rights"),
    (compose, "compose.yaml", set_in("services", "store", "mem_limit"), "store: has no mem_limit"),
    (kuberay, "kuberay/rayjob.yaml", set_in("spec", "submitterPodTemplate"), "submitter: may run as root"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "resources", "limits", value={}), "has no limits"),
    (compose, "compose.yaml", set_in("services", "ray", "port", value=["127.0.0.1:1:1"]), "no compose file"),
]


@pytest.mark.parametrize(("check", "name", "harm", "said"), HARM, ids=[f"{n}-{s}" for _, n, _, s in HARM])
def test_a_harmed_file_is_seen(check: Callable[[Any], list[str]], name: str, harm: Callable[[Any], None], said: str):
    config = copy.deepcopy(load(name))
    harm(config)
    assert said in "\n".join(check(config))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("python:3.11.14-slim", "python:latest", "not pinned"),
        ("USER 1000\n", "", "runs as root"),
        ("COPY tune tune", "ADD https://example.com/tune.tar tune", "fetches something"),
        ('-c constraints.txt ".[cluster,stores]"', '".[cluster,stores]"', "not pinned"),
        ("USER 1000", "RUN apt-get update && apt-get install -y gcc\nUSER 1000", "leaves build tools"),
    ],
)
def test_a_harmed_dockerfile_is_seen(old: str, new: str, said: str):
    text = (DEPLOY / "Dockerfile").read_text()
    assert old in text
    assert said in "\n".join(dockerfile(text.replace(old, new)))


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("node.sh", "--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", "opens a port"),
        ("slurm/eagleray.sbatch", '"$state/token"', "$state/token", "SC2086"),
        ("slurm/eagleray.sbatch", "set -euo pipefail", "set -x", "goes on after an error"),
        ("spot.sh", "done\n", "\n", "is no bash"),
    ],
)
def test_a_harmed_script_is_seen(name: str, old: str, new: str, said: str):
    text = (DEPLOY / name).read_text()
    assert old in text
    assert said in "\n".join(script(text.replace(old, new)))


def secrets(text: str) -> list[str]:
    found = [m.group(0) for m in SECRET.finditer(text)]
    return [f for f in found if not re.search(r"\$|expected|REPLACE", f)] + KEYS.findall(text)


@pytest.mark.parametrize(
    "line", ["POSTGRES_PASSWORD=horsebattery", "auth_token: 'abcdef123456'", "AKIAABCDEFGHIJKLMNOP"]
)
def test_a_secret_would_be_seen(line: str):
    assert secrets((DEPLOY / "compose.yaml").read_text() + line)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(DEPLOY)))
def test_no_secret_and_nothing_for_the_world(path: Path):
    text = path.read_text()
    assert secrets(text) == []
    assert "0.0.0.0/0" not in text
    assert "::/0" not in text
    lines = [line for line in text.splitlines() if "0.0.0.0" in line]
    assert all("container" in line or "rayStartParams" in line for line in lines), lines
    if path.name.endswith(".example"):
        assert all(re.fullmatch(r"(#.*|\w+=|)", line) for line in text.splitlines())


def test_deploy_travels_in_the_wheel_without_python():
    assert '"deploy" = "eagleray/_bundled/deploy"' in (ROOT / "pyproject.toml").read_text()
    assert not [f for f in FILES if f.suffix == ".py"]
