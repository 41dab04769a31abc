#!/usr/bin/env python
"""Takes the pictures of pages in docs/images/pages/ with Chromium: what `eagleray watch` serves of a run, the map of
its training data, and the run in MLflow.

python docs/screenshots.py [RUN]

RUN is a finished run with its history in SQLite, by default that of `make demo`. The map needs what `eagleray data
measure`, `embed` and `data cluster` have written beside the shards.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from PIL import Image

import eagleray
from eagleray.base.errors import UserError

PAGES = Path(__file__).with_name("images") / "pages"
SIZES = {"": (1280, 1400), "-phone": (390, 1400)}  # pixels: of a desk, of a phone
PATIENCE = 120  # seconds until a page is there
BROWSER = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    run = eagleray.Run(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    PAGES.mkdir(exist_ok=True)
    with eagleray.watch(run.folder) as page:
        take(page.url, "report")
    shards = run.recipe["data"]["train"]
    with tempfile.TemporaryDirectory() as scratch:
        take(eagleray.data_map(shards, Path(scratch) / "map.html").as_uri(), "map")
    with mlflow(run.folder) as url:
        take(url, "mlflow", phone=False)


def take(url: str, name: str, *, phone: bool = True) -> None:
    """Save the top of a page as docs/images/pages/NAME.png, and as NAME-phone.png."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if not program:
        raise UserError("chromium: not found; Debian's package of this name has it")
    for suffix, (width, height) in SIZES.items():
        path = PAGES / f"{name}{suffix}.png"
        if suffix and not phone:
            continue
        with tempfile.TemporaryDirectory() as profile:
            options = [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={path}"]
            wait = ["--hide-scrollbars", "--virtual-time-budget=20000"]  # milliseconds for the scripts of a page
            subprocess.run(
                [program, *BROWSER, *options, *wait, url], check=True, stderr=subprocess.DEVNULL, timeout=PATIENCE
            )
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
        print(path)


@contextmanager
def mlflow(folder: Path) -> Iterator[str]:
    """Serve the history of a run on loopback, and yield the address of its page."""
    [(uri, note)] = json.loads((folder / "mlflow.json").read_text()).items()
    experiment = MlflowClient(uri).get_run(note["run_id"]).info.experiment_id
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{s.getsockname()[1]}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE
        while not answers(f"{address}/health"):
            if time.monotonic() > end or server.poll() is not None:
                raise UserError(f"mlflow server: does not answer within {PATIENCE} s")
            time.sleep(0.5)
        yield f"{address}/#/experiments/{experiment}/runs/{note['run_id']}"
    finally:
        server.terminate()
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        sys.exit(f"error: {e}")
