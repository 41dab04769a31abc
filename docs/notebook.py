"""Run docs/quickstart.ipynb in an empty folder and store its outputs, without the places of this machine.

python docs/notebook.py
"""

import base64
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

NOTEBOOK = Path(__file__).parent / "quickstart.ipynb"
WIDTH = 640  # pixels of a stored picture at most


def run() -> None:
    """Execute every cell and write the notebook with what the cells have shown."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata.clear()
            if cell.cell_type == "code":
                cell.outputs = [tidy(output, folder) for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, NOTEBOOK)


def tidy(output: Any, folder: str) -> Any:
    """Return an output with small pictures, and texts without the folder that the notebook ran in."""
    data = output.get("data", {})
    if "text" in output:
        output.text = portable(output.text, folder)
    if "text/plain" in data:
        data["text/plain"] = portable(data["text/plain"], folder)
    if "image/png" in data:
        data["image/png"] = smaller(data["image/png"])
    data.pop("text/html", None)
    return output


def portable(text: str, folder: str) -> str:
    """Return a text without the folder that the notebook ran in, and without that of the programs."""
    return re.sub(r"\S*/bin/mlflow", "mlflow", re.sub(rf"(\S*/)?{re.escape(folder)}/?", "", text))


def smaller(picture: str) -> str:
    """Return a PNG in base64 with 256 colours and at most WIDTH pixels a row."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.thumbnail((WIDTH, 10 * WIDTH))
    image.quantize(256).save(file := io.BytesIO(), "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    run()
