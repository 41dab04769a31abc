"""Start the command of a job on the head, after checking that the Python of the cluster's Ray has all dependencies.

    python3 eagleray/cluster/job_start.py MODULE pretrain recipe.yaml

This file is run as a script, as above, and imports only the standard library, as any other package may be missing."""

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# The packages in pyproject.toml that are imported under their own names. MODULES maps every package to its module.
SAME = """
torch torchvision timm numpy pyarrow duckdb scipy isal simplejpeg urllib3 braceexpand platformdirs psutil matplotlib
huggingface_hub jinja2 pydantic safetensors rich typer webdataset boto3 mlflow ray
"""
MODULES = {name: name for name in SAME.split()} | {"pillow": "PIL", "opencv-python-headless": "cv2", "pyyaml": "yaml"}
MODULES |= {"scikit-learn": "sklearn", "faster-coco-eval": "faster_coco_eval"}
VMSTAT = Path("/proc/vmstat")
LOOK = 10.0  # seconds between two reads of VMSTAT, the kernel's counters


def missing(modules: dict[str, str]) -> list[str]:
    """Return the packages whose module this interpreter cannot find."""
    return [name for name, module in modules.items() if importlib.util.find_spec(module) is None]


def start(words: Sequence[str]) -> None:
    """Run the module `words[0]` with its arguments and exit with its status, or with 2 when a package is missing."""
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
    """Run a command and return its exit status, or 128 + N if signal N kills it. A line is then printed that names the
    signal, and says whether the kernel has just killed processes because memory ran out."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ray also sends SIGINT to the command, which handles it
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
    """Return how many processes the kernel has killed since this machine booted because memory ran out."""
    text = VMSTAT.read_text() if VMSTAT.exists() else ""
    return sum(map(int, re.findall(r"^oom_kill (\d+)$", text, re.M)))


if __name__ == "__main__":
    sys.path.pop(0)  # remove this file's folder, so that its modules hide no package
    start(sys.argv[1:])
