"""A notebook shows the progress of a run, and interrupting its kernel saves and returns."""

import threading
import time
from pathlib import Path

import pytest

from eagleray.base.files import read_lines


@pytest.mark.slow
def test_a_notebook_shows_progress_and_can_be_interrupted(small: Path, shards: Path, tmp_path: Path):
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    try:
        shown: list[str] = []

        def execute(code: str) -> None:
            def keep(message: dict) -> None:  # type: ignore[type-arg]
                content = message["content"]
                shown.append(content.get("text") or str(content.get("data", {}).get("text/plain", "")))
                shown.extend(content.get("traceback", []))

            client.execute_interactive(code, timeout=300, output_hook=keep)

        execute("import eagleray")
        keys = f'{{"data.train": {str(shards / "train")!r}, "evaluate.probe_epochs": 0, "optim.epochs": 1000}}'
        call = f"run = eagleray.pretrain({str(small)!r}, {keys}, out={str(tmp_path / 'out')!r}"
        execute(f"{call}, max_steps=4)\nrun")
        text = "".join(shown)
        assert "step 4/4 (100%)  loss" in text, text
        assert "finished=True, step=4" in text

        def interrupt() -> None:
            while len(read_lines(tmp_path / "out" / "metrics.jsonl")) < 6:
                time.sleep(0.05)
            kernel.interrupt_kernel()

        threading.Thread(target=interrupt).start()
        shown.clear()
        execute(f"{call})\nprint(run.finished)")
        assert "stopping after this step; Ctrl-C once more ends at once" in "".join(shown)
        assert "".join(shown).rstrip().endswith("False"), shown
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
