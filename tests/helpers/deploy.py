"""The files of deploy/, and what is wrong with one of them: by the schemas of the tools that read it, and by what we
promise."""

import copy
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from eagleray.cluster.prometheus import FINDINGS, GAUGES, PLANNED, PREFIX, PROGRESS, WANTED

DEPLOY = Path(__file__).parents[2] / "deploy"
TOOLS = Path(sys.executable).parent  # of this environment
CRD = Path(__file__).parents[1] / "deploy" / "kuberay_crd.json"


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def exported() -> set[str]:
    """Return the names of the metrics as Prometheus sees them."""
    names = *GAUGES, PROGRESS[0], PLANNED[0], WANTED[0], f"{FINDINGS[0]}_total"
    return {f"ray_{PREFIX}{name}" for name in names}


# Each check returns what is wrong, in words.


def ray_up(config: dict[str, Any]) -> list[str]:
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(merged := prepare_config(copy.deepcopy(config)))
    except Exception as e:
        return [f"Ray refuses it: {e}"]
    aws = config["provider"]["type"] == "aws"
    types = dict(config["available_node_types"])
    head = types.pop(config["head_node_type"])

    def spot(node: dict[str, Any]) -> bool:
        if aws:
            return node.get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        return node.get("scheduling", {}).get("provisioningModel") == "SPOT"

    cloud = ec2 if aws else compute
    wrong = [
        f"{name}: {w}" for name, each in config["available_node_types"].items() for w in cloud(each["node_config"])
    ]
    if spot(head["node_config"]):
        wrong.append("the head is on spot")
    wrong += [f"Ray merges in: {c}" for c in merged["head_setup_commands"] + merged["worker_setup_commands"]]
    if not any("memlock=-1" in o for o in config["docker"]["run_options"]):
        wrong.append("RDMA cannot pin memory")
    if head["resources"].get("CPU") != 0 or "GPU" in head["resources"]:
        wrong.append("workers could run on the head")
    for name, each in types.items():
        if not spot(each["node_config"]):
            wrong.append(f"{name} is not on spot")
        if not each["resources"].get("GPU"):
            wrong.append(f"{name} has no GPU")
        if not 0 == each["min_workers"] <= each["max_workers"] <= config["max_workers"]:
            wrong.append(f"{name} does not scale")
        if not aws and any("accessConfigs" in n for n in each["node_config"]["networkInterfaces"]):
            wrong.append(f"{name} has an address on the internet")
    for name, each in {"head": head, **types}.items():
        node = each["node_config"]
        if aws and node.get("MetadataOptions", {}).get("HttpTokens") != "required":
            wrong.append(f"{name} answers IMDSv1")
        if aws and not (
            node.get("SecurityGroupIds") or all("Groups" in n for n in node.get("NetworkInterfaces", [{}]))
        ):
            wrong.append(f"{name} gets Ray's security group, which lets the world in on port 22")
        if not (node.get("IamInstanceProfile") or node.get("serviceAccounts")):
            wrong.append(f"{name} gets Ray's own role, which may do too much")
    if any("security_group" in str(k) or "--dashboard-host" in str(v) for k, v in walk(config)):
        wrong.append("opens more than node.sh does")
    if config["file_mounts"].get("/home/ray/.ray/auth_token") != "~/.ray/auth_token":
        wrong.append("has no token")
    return wrong


def ec2(node: dict[str, Any]) -> list[str]:
    """What AWS' own model of RunInstances says of a machine."""
    from botocore.validate import ParamValidator

    own = {"SubnetIds"}  # Ray chooses one of them
    given = {k: v for k, v in node.items() if k not in own} | {"MinCount": 1, "MaxCount": 1}
    return [line for line in ParamValidator().validate(given, run_instances()).generate_report().splitlines() if line]


@functools.cache
def run_instances() -> Any:
    import botocore.session

    return botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape


def compute(node: dict[str, Any]) -> list[str]:
    """What Google's own description of an instance says of a machine."""
    return list(unlike(node, {"$ref": "Instance"}, compute_schemas(), "node_config"))


@functools.cache
def compute_schemas() -> dict[str, Any]:
    import googleapiclient.discovery_cache as cache

    schemas: dict[str, Any] = json.loads((Path(cache.DISCOVERY_DOC_DIR) / "compute.v1.json").read_text())["schemas"]
    return schemas


KINDS = {"string": str, "boolean": bool, "integer": int, "object": dict, "array": list}


def unlike(value: Any, schema: dict[str, Any], schemas: dict[str, Any], where: str) -> Iterator[str]:
    """Yield where a value differs from a schema of Google's discovery documents."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    if not isinstance(value, KINDS[schema["type"]]) and not (where.endswith("Gb") and isinstance(value, int)):
        yield f"{where}: {value!r} is no {schema['type']}"
    elif isinstance(value, dict):
        for key, item in value.items():
            known = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if known:
                yield from unlike(item, known, schemas, f"{where}.{key}")
            else:
                yield f"{where}: has no field {key}"
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from unlike(item, schema["items"], schemas, f"{where}[{i}]")
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value} is none of {', '.join(schema['enum'])}"


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

    schema = json.loads(CRD.read_text())
    kind = manifest["kind"]
    checker = jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{kind}"})
    wrong = [f"{e.json_path}: {e.message}" for e in checker.iter_errors(manifest["spec"])]
    if manifest["apiVersion"] != "ray.io/v1" or set(manifest) != {"apiVersion", "kind", "metadata", "spec"}:
        wrong.append("is no object of ray.io/v1")
    spec = manifest["spec"] if kind == "RayCluster" else manifest["spec"]["rayClusterSpec"]
    if kind == "RayJob":
        wrong += [f"submitter: {w}" for w in confined(manifest["spec"].get("submitterPodTemplate", {}).get("spec", {}))]
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


def confined(pod: dict[str, Any]) -> list[str]:
    wrong = [] if pod.get("imagePullSecrets") else ["cannot log in to a registry"]
    if not pod.get("securityContext", {}).get("runAsNonRoot") or pod.get("hostNetwork"):
        wrong.append("may run as root")
    for container in pod.get("containers", [{}]):
        if container.get("securityContext", {}).get("allowPrivilegeEscalation") is not False:
            wrong.append("may gain rights")
        if not container.get("resources", {}).get("limits"):
            wrong.append("has no limits")
    return wrong


def a_pod(pod: dict[str, Any], *, worker: bool) -> list[str]:
    [container] = pod["containers"]
    wrong = confined(pod)
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
        if service.get("cap_drop") != ["ALL"] or "no-new-privileges:true" not in service.get("security_opt", []):
            wrong.append(f"{name}: may gain rights")
        for key in ("pids_limit", "mem_limit", "logging"):
            if key not in service:
                wrong.append(f"{name}: has no {key}")
        if service["image"].endswith(":latest") or ":" not in service["image"]:
            wrong.append(f"{name}: {service['image']} is not pinned")
        if service.get("restart") != "no" and not service.get("profiles") and "healthcheck" not in service:
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
    if re.search("build-essential|gcc|apt-get", last):
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
