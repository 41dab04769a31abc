"""The database of MLflow is made whole or not at all."""

import sys
from pathlib import Path

import pytest
from helpers import forked
from mlflow import MlflowClient

from eagleray.runs.mlflow_db import make_database


def test_a_database_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its maker may be killed, and several may make it at once: half of it would be of no use to anybody."""
    uri, path = f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "search_experiments", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make_database(uri)
    assert not path.exists()
    command = [sys.executable, "-c", f"from eagleray.runs.mlflow_db import make_database; make_database({uri!r})"]
    makers = [forked.Popen(command) for _ in range(2)]
    assert [m.wait() for m in makers] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["mlflow.db"]
    client = MlflowClient(uri)
    made = client.create_run(client.create_experiment("one")).info.run_id
    make_database(uri)
    assert client.get_run(made).info.run_id == made
