"""Chromium without a window, for tests of pages; they are skipped where there is none."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import pytest

QUIET = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@contextmanager
def browsing(url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A context in which a browser shows a page."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if not program:
        pytest.skip("no Chromium")
    with TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", *QUIET, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [*command, *options, url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
