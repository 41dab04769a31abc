"""What `ray up` does to a machine, done here: Ray's own code with our configuration, while programs of ours stand for
the cloud, ssh, rsync and Docker. What runs in the container runs as the image's user, in folders like the image's."""

import copy
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml
from helpers.deploy import DEPLOY

HOST = {  # the machine that the cloud starts: it has Docker, and what logs in to the cloud's registry
    "ssh": """
while [ $# -gt 0 ]; do case "$1" in -o | -i) shift 2 ;; -*) shift ;; *) break ;; esac; done
shift # the machine
HOME=$PLACE/host exec setsid --wait bash -c "$*"
""",
    "rsync": """
from=${*: -2:1} to=${*: -1}
case "$to" in
eagleray:*) docker exec -i eagleray sh -c "cat > ${to#*:}" <"$from" ;;
*) cp -p "$from" "${to#*:}" ;;
esac
""",
    "docker": """
echo "docker $*" >>"$PLACE/asked"
case "$1 $*" in
"login "*) grep -q a-password ;;
"info "*) echo "map[runc:{}]" ;;
"inspect "*Running*) [ ! -e "$PLACE/runs" ] || echo true ;;
"inspect "*Config.Image*) echo REPLACE_REGISTRY/eagleray:0.1.0 ;;
"inspect "*Config.Env*) echo '["PATH=/opt/eagleray/bin"]' ;;
"run "*)
    touch "$PLACE/runs"
    while [ $# -gt 1 ]; do
        [ "$1" != -v ] || { echo "$2" >>"$PLACE/runs" && inside mount "${2%%:*}" "${2#*:}"; }
        shift
    done
    ;;
"restart "*) # a file that is mounted is that of the container's start: rsync writes another one
    [ -e "$PLACE/runs" ] || exit 1
    while IFS=: read -r from to; do inside mount "$from" "$to"; done <"$PLACE/runs"
    ;;
"exec "*)
    shift
    while [ "${1:0:1}" = - ]; do shift; done
    shift # the container
    inside "$@"
    ;;
esac
""",
    "chown": "",  # to the user of that machine
    "aws": 'echo "aws $*" >>"$PLACE/asked"; echo a-password\n',
    "gcloud": 'echo "gcloud $*" >>"$PLACE/asked"\n',
}
# The image: whatever is not ours is this machine's. A file that is mounted keeps its owner.
INSIDE = """
unshare --mount bash -c '
mount --make-rprivate /
for folder in opt home usr/local/bin etc/profile.d; do mount --bind "$PLACE/image/$folder" "/$folder"; done
[ "$1" != mount ] || { mkdir -p "$(dirname "$3")"; cp "$2" "$3"; chmod 600 "$3"; /bin/chown 1000:1000 "$3"; exit; }
cd /home/ray
exec setpriv --reuid 1000 --regid 1000 --clear-groups \\
    env -i HOME=/home/ray PATH=/opt/eagleray/bin:/usr/local/bin:/usr/bin:/bin "$@"
' inside "$@"
"""
IMAGE = {
    # As the real one: it reads what it is given.
    "opt/eagleray/bin/ray": """
echo "ray $*${SETTING:+ with $SETTING}" >>/home/ray/told
[ "$1" = stop ] || cat ~/.ray/auth_token || exit 1
for word in "$@"; do case "$word" in *config=*) cat "${word#*=}" || exit 1 ;; esac; done
""",
    "opt/eagleray/bin/pip": """
echo "pip $*" >>/home/ray/told
touch /opt/eagleray/lib/installed # the environment is root's
""",
    "usr/local/bin/serve.sh": 'echo "serve.sh $*" >>/home/ray/told\n',
    "usr/local/bin/spot.sh": 'echo "spot.sh $*" >>/home/ray/told\n',
}


class Machine:
    """One machine, `ray up`'s head or a worker that the head starts, in a folder."""

    def __init__(self, place: Path, cluster: str) -> None:
        self.place, self.image, self.cluster, self.cloud = place, place / "image", cluster, provider()
        for name, text in IMAGE.items():
            program(self.image / name, text)
        (self.image / "opt/eagleray/lib").mkdir()
        shutil.copy(DEPLOY / "node.sh", self.image / "usr/local/bin")
        (self.image / "etc/profile.d").mkdir(parents=True)
        [line] = re.findall(r"echo '(PATH=.*)' > /etc/profile.d", (DEPLOY / "Dockerfile").read_text())
        (self.image / "etc/profile.d/eagleray.sh").write_text(line + "\n")
        home = self.image / "home/ray"
        shutil.copytree("/etc/skel", home, dirs_exist_ok=True)
        for path in (home, *home.rglob("*")):
            os.chown(path, 1000, 1000)
        for name, text in (HOST | {"inside": INSIDE}).items():
            program(place / "bin" / name, text)
        program(place / "host/.bashrc", "")
        # A login shell sets the path anew.
        (place / "host/.bash_profile").write_text(f"PATH={place / 'bin'}:$PATH PLACE={place}\nexport PLACE\n")

    @property
    def asked(self) -> list[str]:
        """What the machine itself was asked to run."""
        return (self.place / "asked").read_text().splitlines()

    @property
    def told(self) -> list[str]:
        """What ran in the container."""
        return (self.image / "home/ray/told").read_text().splitlines()

    def files(self, secrets: Path) -> dict[str, Any]:
        """The files of the user who calls `ray up`, or of the head."""
        secrets.mkdir(exist_ok=True)
        for name in {"env", "token", "key"} - {path.name for path in secrets.iterdir()}:
            (secrets / name).write_text("SETTING=old\n")
        mounts = {"/home/ray/.eagleray.env": str(secrets / "env"), "/home/ray/.ray/auth_token": str(secrets / "token")}
        return {"cluster_name": self.cluster, "file_mounts": mounts}

    def close(self) -> None:
        shutil.rmtree(f"/tmp/ray_tmp_mount/{self.cluster}", ignore_errors=True)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


def provider() -> Any:
    """A cloud of Ray's whose machines are all this one."""
    from ray.autoscaler.node_provider import NodeProvider

    class Cloud(NodeProvider):
        def __init__(self) -> None:
            super().__init__({}, "cluster")
            self.tags: dict[str, dict[str, str]] = {}

        def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
            return [n for n, tags in self.tags.items() if tag_filters.items() <= tags.items()]

        def create_node(self, node_config: Any, tags: dict[str, str], count: int) -> None:
            self.tags["a-machine"] = dict(tags)

        def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
            self.tags.setdefault(node_id, {}).update(tags)

        def node_tags(self, node_id: str) -> dict[str, str]:
            return self.tags.get(node_id, {})

        def is_terminated(self, node_id: str) -> bool:
            return False

        def internal_ip(self, node_id: str) -> str:
            return "10.0.0.5"

        external_ip = internal_ip

    return Cloud()


def start_head(machine: Machine, config: dict[str, Any], secrets: Path) -> None:
    """What `ray up` does once it has a machine. Raises ClickException when a command on it fails."""
    from ray.autoscaler._private.commands import get_or_create_head_node
    from ray.autoscaler._private.util import _hash_cache, prepare_config

    _hash_cache.clear()  # each `ray up` is a process of its own
    whole = prepare_config(copy.deepcopy(config) | machine.files(secrets))
    whole["auth"]["ssh_private_key"] = str(secrets / "key")
    get_or_create_head_node(
        whole, "cluster.yaml", False, False, True, None, _provider=machine.cloud, _runner=subprocess
    )


def start_worker(machine: Machine, kind: str, given: Path, secrets: Path) -> None:
    """What the head does once it has a machine of a kind, by the configuration that `ray up` has `given` it. Raises an
    exception when a command on it fails."""
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.instance_manager.ray_installer import RayInstaller
    from ray.core.generated.instance_manager_pb2 import Instance

    config = AutoscalingConfig(yaml.safe_load(given.read_text()) | machine.files(secrets))
    node = Instance(instance_id="1", cloud_instance_id="a-machine", instance_type=kind)
    RayInstaller(machine.cloud, config).install_ray(node, "10.0.0.5")
