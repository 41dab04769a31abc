"""Start the command of a job on the head of a cluster, after checking that the environment of the cluster's Ray has
what Eagleray imports.

    python3 eagleray/cluster/job_start.py MODULE pretrain recipe.yaml

It is run as a file, before anything that may be missing is imported.
"""

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# The distributions of pyproject.toml, and what is imported of each: a module of the same name, or of another.
SAME = """
torch torchvision timm numpy pyarrow duckdb scipy isal simplejpeg urllib3 braceexpand platformdirs psutil matplotlib
huggingface_hub jinja2 pydantic safetensors rich typer webdataset boto3 mlflow ray
"""
MODULES = {name: name for name in SAME.split()} | {"pillow": "PIL", "opencv-python-headless": "cv2", "pyyaml": "yaml"}
MODULES |= {"scikit-learn": "sklearn", "faster-coco-eval": "faster_coco_eval"}
VMSTAT = Path("/proc/vmstat")
LOOK = 10.0  # seconds between two looks at it


def missing(modules: dict[str, str]) -> list[str]:
    """Return the distributions whose module this interpreter does not find."""
    return [name for name, module in modules.items() if importlib.util.find_spec(module) is None]


def start(words: Sequence[str]) -> None:
    """Run a module, the first word, with its arguments, and exit with its status; with 2 when the environment lacks a
    package."""
    if lacks := missing(MODULES):
        version = ".".join(map(str, sys.version_info[:3]))
        print(
            f"error: {sys.prefix}, the environment of the cluster's Ray (Python {version}), lacks {', '.join(lacks)}; "
            "expected the packages of constraints.txt, as in the image of deploy/Dockerfile",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(run([sys.executable, "-m", *words]))


def run(command: Sequence[str]) -> int:
    """Return the exit status of a command, as a shell has it. If a signal kills it, a line says which, and whether the
    kernel has ended processes of this machine meanwhile as there was no memory left."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ray sends it to the command as well
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    before = last = ended_for_memory()
    while True:
        try:
            status = process.wait(LOOK)
            break
        except subprocess.TimeoutExpired:
            before, last = last, ended_for_memory()
    if status >= 0:
        return status
    why = ": this machine has run out of memory, and its kernel has ended processes" * (ended_for_memory() > before)
    print(f"error: killed by {signal.Signals(-status).name}{why}", file=sys.stderr)
    return 128 - status


def ended_for_memory() -> int:
    """Return how many processes the kernel of this machine has ended as there was no memory left."""
    text = VMSTAT.read_text() if VMSTAT.exists() else ""
    return sum(map(int, re.findall(r"^oom_kill (\d+)$", text, re.M)))


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder
    start(sys.argv[1:])
