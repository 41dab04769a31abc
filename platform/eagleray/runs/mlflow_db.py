"""Create MLflow's SQLite database so that concurrent runs and kills cannot damage it."""

import os
import tempfile
from pathlib import Path


def make_database(uri: str) -> None:
    """Create an SQLite database that does not exist yet. It is filled under another name and then moved into place:
    a process that is killed half-way would leave a useless file, and two runs that start at once would damage each
    other's."""
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
