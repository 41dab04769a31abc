"""What deploy/ promises: valid for the tools that read it, nothing open to the world, no secret inside."""

import copy
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.deploy import DEPLOY, TOOLS

ROOT = Path(__file__).parents[2]
SCRIPTS = [DEPLOY / "node.sh", DEPLOY / "spot.sh", DEPLOY / "mlflow/serve.sh", DEPLOY / "slurm/eagleray.sbatch"]
FILES = [f for f in sorted(DEPLOY.rglob("*")) if f.is_file() and "grafana" not in f.parts]
SECRET = re.compile(
    r"(?i)(?<!http)(password|passwd|secret|token|access_key)[a-z_]*[\"']?[ =:]*[=:][ \"']*\w[^\s\"'$}]{7,}"
)
KEYS = re.compile(r"AKIA[0-9A-Z]{12,}|BEGIN [A-Z ]*PRIVATE KEY|gh[pousr]_[A-Za-z0-9]{20,}|eyJ[A-Za-z0-9_-]{20,}")


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


# Each check returns what is wrong, in words.


def ray_up(config: dict[str, Any]) -> list[str]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except Exception as e:
        return [f"Ray refuses it: {e}"]
    aws = config["provider"]["type"] == "aws"
    types = dict(config["available_node_types"])
    head = types.pop(config["head_node_type"])

    def spot(node: dict[str, Any]) -> bool:
        if aws:
            return node.get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        return node.get("scheduling", {}).get("provisioningModel") == "SPOT"

    wrong = []
    if spot(head["node_config"]):
        wrong.append("the head is on spot")
    if head["resources"].get("CPU") != 0 or "GPU" in head["resources"]:
        wrong.append("workers could run on the head")
    for name, each in types.items():
        if not spot(each["node_config"]):
            wrong.append(f"{name} is not on spot")
        if not each["resources"].get("GPU"):
            wrong.append(f"{name} has no GPU")
        if not 0 <= each["min_workers"] < each["max_workers"] <= config["max_workers"]:
            wrong.append(f"{name} does not scale")
        if not aws and any("accessConfigs" in n for n in each["node_config"]["networkInterfaces"]):
            wrong.append(f"{name} has an address on the internet")
    for name, each in {"head": head, **types}.items():
        node = each["node_config"]
        if aws and node.get("MetadataOptions", {}).get("HttpTokens") != "required":
            wrong.append(f"{name} answers IMDSv1")
        if aws and not node.get("SecurityGroupIds"):
            wrong.append(f"{name} gets Ray's security group, which lets the world in on port 22")
        if not (node.get("IamInstanceProfile") or node.get("serviceAccounts")):
            wrong.append(f"{name} gets Ray's own role, which may do too much")
    if any("security_group" in str(k) or "--dashboard-host" in str(v) for k, v in walk(config)):
        wrong.append("opens more than node.sh does")
    if config["file_mounts"].get("/home/ray/.ray/auth_token") != "~/.ray/auth_token":
        wrong.append("has no token")
    return wrong


def walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All keys and plain values of nested lists and maps."""
    if isinstance(value, dict):
        for k, v in value.items():
            yield from walk(v, k)
    elif isinstance(value, list):
        for v in value:
            yield from walk(v, key)
    else:
        yield key, value


def kuberay(manifest: dict[str, Any]) -> list[str]:
    import jsonschema
    import kubernetes_validate

    schema = yaml.safe_load(Path(__file__).with_name("kuberay_schema.yaml").read_text())
    kind = manifest["kind"]
    checker = jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"})
    wrong = [f"{e.json_path}: {e.message}" for e in checker.iter_errors(manifest["spec"])]
    if manifest["apiVersion"] != "ray.io/v1" or set(manifest) != {"apiVersion", "kind", "metadata", "spec"}:
        wrong.append("is no object of ray.io/v1")
    spec = manifest["spec"] if kind == "RayCluster" else manifest["spec"]["rayClusterSpec"]
    if spec.get("authOptions", {}).get("mode") != "token":
        wrong.append("has no token")
    if spec["headGroupSpec"].get("serviceType") != "ClusterIP" or spec["headGroupSpec"].get("enableIngress"):
        wrong.append("opens the head")
    if spec["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        wrong.append("workers could run on the head")
    if spec.get("autoscalerOptions", {}).get("version") != "v2" or not spec.get("enableInTreeAutoscaling"):
        wrong.append("does not scale")
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        name = group.get("groupName", "head")
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}
        try:
            kubernetes_validate.validate(whole, "1.33", strict=True)
        except kubernetes_validate.ValidationError as e:
            wrong.append(f"{name}: {e.message}")
        wrong += [f"{name}: {w}" for w in a_pod(pod, worker="groupName" in group)]
    return wrong


def a_pod(pod: dict[str, Any], *, worker: bool) -> list[str]:
    [container] = pod["containers"]
    wrong = []
    if not pod.get("securityContext", {}).get("runAsNonRoot") or pod.get("hostNetwork"):
        wrong.append("may run as root")
    if container.get("securityContext", {}).get("allowPrivilegeEscalation") is not False:
        wrong.append("may gain rights")
    if any("hostPort" in p for p in container.get("ports", [])):
        wrong.append("has a port on the node")
    wrong += [f"has no {p}" for p in ("livenessProbe", "readinessProbe") if p not in container]
    shared = [v["name"] for v in pod.get("volumes", []) if v.get("emptyDir", {}).get("medium") == "Memory"]
    if {"mountPath": "/dev/shm", "name": "shm"} not in container.get("volumeMounts", []) or "shm" not in shared:
        wrong.append("has no /dev/shm")
    if not any("secretRef" in e for e in container.get("envFrom", [])):
        wrong.append("has no keys of the object store")
    if worker:
        if not container["resources"]["limits"].get("nvidia.com/gpu"):
            wrong.append("has no GPU")
        if "SPOT" not in str(pod.get("nodeSelector")) or not pod.get("tolerations"):
            wrong.append("is not on spot")
        env = {e["name"]: e.get("value") for e in container.get("env", [])}
        drain = float(env.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S") or 30)
        if pod.get("terminationGracePeriodSeconds", 30) < drain + 10:
            wrong.append("is killed while it drains")
    elif "SPOT" in str(pod.get("nodeSelector")):
        wrong.append("is on spot")
    return wrong


def compose(config: dict[str, Any]) -> list[str]:
    from compose_spec import PyCompose

    try:
        PyCompose.from_yaml(yaml.safe_dump(config))
    except ValueError as e:
        return [f"is no compose file: {e}"]
    wrong = []
    for name, service in config["services"].items():
        for port in service.get("ports", []):
            if not str(port).startswith("127.0.0.1:"):
                wrong.append(f"{name}: {port} is open to the world")
        if service.get("network_mode") == "host" or service.get("privileged"):
            wrong.append(f"{name}: leaves its container")
        if service["image"].endswith(":latest") or ":" not in service["image"]:
            wrong.append(f"{name}: {service['image']} is not pinned")
        if name != "buckets" and not service.get("profiles") and "healthcheck" not in service:
            wrong.append(f"{name}: has no healthcheck")
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN$|ACCESS_KEY", key) and not re.fullmatch(r"\$\{\w+:\?.+\}", str(value)):
                wrong.append(f"{name}: {key} has a default")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if not source.startswith("./") and source not in config["volumes"]:
                wrong.append(f"{name}: {source} is no named volume")
    return wrong


def dockerfile(text: str) -> list[str]:
    done = subprocess.run(
        [TOOLS / "hadolint", "--no-color", "--failure-threshold", "info", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    wrong = done.stdout.splitlines() if done.returncode else []
    stages = {line.split()[3] for line in text.splitlines() if line.startswith("FROM") and " AS " in line}
    bases = [line.split()[1] for line in text.splitlines() if line.startswith("FROM")]
    wrong += [f"{b} is not pinned" for b in bases if b not in stages and not re.search(r":\d+\.\d+\.\d+", b)]
    if re.findall(r"^USER (.+)$", text, re.M)[-1:] != ["1000"]:
        wrong.append("runs as root")
    if re.search(r"^ADD |https?://", text, re.M):
        wrong.append("fetches something unpinned")
    joined = text.replace("\\\n", "")
    wrong += [
        f"not pinned: {line}"
        for line in joined.splitlines()
        if re.search("pip (install|wheel)", line) and not re.search("-c constraints.txt|--no-deps /dist", line)
    ]
    last = joined.rsplit("\nFROM", 1)[1]
    if re.search("build-essential|gcc|apt-get|python3.12-venv", last):
        wrong.append("leaves build tools")
    return wrong


def script(text: str) -> list[str]:
    done = subprocess.run([TOOLS / "shellcheck", "--shell=bash", "-"], input=text, capture_output=True, text=True)
    wrong = done.stdout.splitlines() if done.returncode else []
    if subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode:
        wrong.append("is no bash")
    if "0.0.0.0" in text:
        wrong.append("opens a port")
    if re.search(r"\becho\b[^\n]*\$\{?\w*(TOKEN|SECRET|PASSWORD)", text):
        wrong.append("prints a secret")
    if "set -euo pipefail" not in text:
        wrong.append("goes on after an error")
    return wrong


def test_cluster_launcher_files_are_valid():
    assert ray_up(load("aws.yaml")) == []
    assert ray_up(load("gcp.yaml")) == []


def test_kuberay_manifests_are_valid():
    cluster, job = load("kuberay/raycluster.yaml"), load("kuberay/rayjob.yaml")
    assert kuberay(cluster) == []
    assert kuberay(job) == []
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]


def test_compose_files_are_valid():
    base, gpu = load("compose.yaml"), load("compose.gpu.yaml")
    assert compose(base) == []
    assert set(gpu["services"]) <= set(base["services"])
    assert [d["driver"] for _, d in leaves(gpu, "devices")] == ["nvidia"]
    given = set(re.findall(r"^#?(\w+)=", (DEPLOY / "eagleray.env.example").read_text(), re.M))
    assert set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text())) <= given


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


GPU, HEAD = ("available_node_types", "gpu"), ("available_node_types", "head")
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
    (kuberay, "kuberay/raycluster.yaml", set_in("spec", "authOptions"), "has no token"),
    (kuberay, "kuberay/raycluster.yaml", set_in("spec", "headGroupSpec", "serviceType", value="LoadBalancer"), "opens"),
    (kuberay, "kuberay/raycluster.yaml", set_in("spec", "autoscaler", value={}), "autoscaler"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "resources", "limits", "nvidia.com/gpu"), "has no GPU"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "volumeMounts"), "has no /dev/shm"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "livenessProbe"), "has no livenessProbe"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "volumeMount", value=[]), "volumeMount"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*BOX, "envFrom"), "has no keys"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*WORKER, "nodeSelector"), "is not on spot"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*WORKER, "terminationGracePeriodSeconds", value=60), "drains"),
    (kuberay, "kuberay/raycluster.yaml", set_in(*WORKER, "securityContext", value={"runAsUser": 0}), "as root"),
    (kuberay, "kuberay/rayjob.yaml", set_in("spec", "backofLimit", value=1), "backofLimit"),
    (kuberay, "kuberay/rayjob.yaml", set_in("spec", "submissionMode", value="Http"), "Http"),
    (compose, "compose.yaml", set_in("services", "mlflow", "ports", 0, value="5000:5000"), "open to the world"),
    (compose, "compose.yaml", set_in("services", "ray", "ports", 0, value="0.0.0.0:8265:8265"), "open to the world"),
    (compose, "compose.yaml", set_in("services", "postgres", "environment", "POSTGRES_PASSWORD", value="x"), "default"),
    (compose, "compose.yaml", set_in("services", "store", "image", value="versity/versitygw:latest"), "not pinned"),
    (compose, "compose.yaml", set_in("services", "store", "healthcheck"), "has no healthcheck"),
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
        ("cuda:13.2.1-base", "cuda:latest", "not pinned"),
        ("USER 1000\n", "", "runs as root"),
        ("COPY tune tune", "ADD https://example.com/tune.tar tune", "fetches something"),
        ('-c constraints.txt ".[cluster]"', '".[cluster]"', "not pinned"),
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
