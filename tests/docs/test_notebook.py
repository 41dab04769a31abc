"""The notebook of the documentation runs from its first cell to its last in a real kernel."""

import base64
import io
import re
from pathlib import Path

import nbclient
import nbformat
import pytest
from PIL import Image

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    """The notebook after a run of all its cells in an empty folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(notebook, timeout=540, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """The outputs of one MIME type, in order."""
    data = [o.data.get(kind) for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
    return [o for o in data if o]


@pytest.mark.slow
def test_it_ends_with_a_picture_of_nearest_neighbours_and_features(executed: nbformat.NotebookNode) -> None:
    pictures = [Image.open(io.BytesIO(base64.b64decode(data))) for data in outputs(executed, "image/png")]
    assert len(pictures) == 2  # the loss and the neighbours
    assert pictures[-1].width > 400
    assert len(pictures[-1].convert("RGB").getcolors(2**20) or []) > 1000
    assert "torch.Size([2, 128])" in outputs(executed, "text/plain")[-1]


def test_it_is_stored_with_its_outputs_and_no_place_of_a_machine() -> None:
    """`python docs/notebook.py` stores them."""
    stored = nbformat.read(NOTEBOOK, as_version=4)
    shown = [cell.outputs for cell in stored.cells if cell.cell_type == "code" if "import torch" not in cell.source]
    assert all(shown)
    assert len(outputs(stored, "image/png")) == 2
    texts = [o.text for cell in shown for o in cell if "text" in o] + outputs(stored, "text/plain")
    assert not [text for text in texts if re.search(r"/(tmp|home|root|Users|work)/|error|Traceback", text)]
    assert "index.parquet" in stored.cells[0].source, "what is written beside the photos is said"
