"""Create MLflow's SQLite file so that concurrent runs and kills cannot spoil it."""

import os
import tempfile
from pathlib import Path


def make_database(uri: str) -> None:
    """An SQLite database that is not there yet is made aside and then moved into place: one whose maker was killed
    half-way could never be used, and two runs that begin at once spoil it for each other."""
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or path.exists():
        return
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        made = Path(folder) / path.name
        MlflowClient(f"sqlite:///{made}").search_experiments(max_results=1)
        try:
            os.link(made, path)  # unlike a move, never over another's
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            made.replace(path)
