"""Start the command of a job on the head of a cluster, after checking that the environment of the cluster's Ray has
what Eagleray imports.

    python3 eagleray/cluster/job_start.py MODULE pretrain recipe.yaml

It is run as a file, before anything that may be missing is imported.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence

# The distributions of pyproject.toml, and what is imported of each.
MODULES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "timm": "timm",
    "numpy": "numpy",
    "pillow": "PIL",
    "opencv-python-headless": "cv2",
    "pyarrow": "pyarrow",
    "duckdb": "duckdb",
    "scipy": "scipy",
    "scikit-learn": "sklearn",
    "isal": "isal",
    "simplejpeg": "simplejpeg",
    "urllib3": "urllib3",
    "braceexpand": "braceexpand",
    "platformdirs": "platformdirs",
    "psutil": "psutil",
    "matplotlib": "matplotlib",
    "faster-coco-eval": "faster_coco_eval",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "safetensors": "safetensors",
    "rich": "rich",
    "typer": "typer",
    "webdataset": "webdataset",
    "boto3": "boto3",
    "mlflow": "mlflow",
    "ray": "ray",
}


def missing(modules: dict[str, str]) -> list[str]:
    """Return the distributions whose module this interpreter does not find."""
    return [name for name, module in modules.items() if importlib.util.find_spec(module) is None]


def start(words: Sequence[str]) -> None:
    """Replace this process by a module, the first word, with its arguments. Exits with 2 when the environment lacks a
    package."""
    if lacks := missing(MODULES):
        version = ".".join(map(str, sys.version_info[:3]))
        print(
            f"error: {sys.prefix}, the environment of the cluster's Ray (Python {version}), lacks {', '.join(lacks)}; "
            "expected the packages of constraints.txt, as in the image of deploy/Dockerfile",
            file=sys.stderr,
        )
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, "-m", *words])


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder
    start(sys.argv[1:])
