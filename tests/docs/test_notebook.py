"""The notebook of the documentation runs from its first cell to its last in a real kernel."""

import base64
import io
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


def test_it_is_stored_without_outputs() -> None:
    assert not any(c.get("outputs") for c in nbformat.read(NOTEBOOK, as_version=4).cells)
