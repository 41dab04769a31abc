"""Write kuberay_crd.json: what KubeRay's own resource definitions say of the fields of RayCluster and RayJob.

    python tests/deploy/kuberay_crd.py KUBERAY/ray-operator/config/crd/bases 1.7.0

The definitions are 2.3 MB, nearly all of it descriptions, and pod templates, which are checked against Kubernetes' own
schema. Without both 27 kB are left. KubeRay is licensed under Apache-2.0.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".json")
PODS = {"template", "submitterPodTemplate"}


def lean(schema: Any) -> Any:
    """Return a schema without pod templates and descriptions, in which unknown fields are errors: a cluster would drop
    them silently."""
    if isinstance(schema, list):
        return [lean(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    fields = schema.get("properties")
    kept = {k: lean(v) for k, v in schema.items() if k not in ("description", "properties") and not k.startswith("x-")}
    if isinstance(fields, dict):
        names = {k: {"type": "object"} if k in PODS else lean(v) for k, v in fields.items()}
        kept |= {"properties": names, "additionalProperties": False}
    return kept


def spec(folder: Path, plural: str) -> Any:
    """Return the schema of `spec` of version v1 of a kind."""
    versions = yaml.safe_load((folder / f"ray.io_{plural}.yaml").read_text())["spec"]["versions"]
    [v1] = [v for v in versions if v["name"] == "v1"]
    return lean(v1["schema"]["openAPIV3Schema"]["properties"]["spec"])


if __name__ == "__main__":
    cluster, job = (spec(Path(sys.argv[1]), plural) for plural in ("rayclusters", "rayjobs"))
    assert job["properties"]["rayClusterSpec"] == cluster
    job["properties"]["rayClusterSpec"] = {"$ref": "#/$defs/RayCluster"}
    text = {"kuberay": sys.argv[2], "$defs": {"RayCluster": cluster, "RayJob": job}}
    FILE.write_text(json.dumps(text, separators=(",", ":"), sort_keys=True) + "\n")
