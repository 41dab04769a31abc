"""Say where the history of a run is sent, and remember in the run's folder which run it is there."""

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eagleray.base.errors import UserError, hide_secrets
from eagleray.base.files import write_atomic


@dataclass(frozen=True)
class Tracking:
    """The MLflow server that a run's history is sent to, and the name of the run there."""

    uri: str = field(repr=False)  # may hold a password
    parent: str | None = None  # id of the run that this one is shown under
    name: str | None = None  # of the run; the name of its folder by default
    key: str | None = None  # by which the run is found where its note file is lost; a random one by default
    experiment: str = "eagleray"
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.tags) | ({"mlflow.parentRunId": self.parent} if self.parent else {})


class DataInput(NamedTuple):
    """A data set that a run reads."""

    context: str  # training or test
    name: str
    digest: str  # of the shards' names, sizes and contents, and of how often each is read
    kind: str  # the scheme of its URL, or local
    source: str  # JSON: its URLs
    profile: str  # JSON: images, shards and whether it has labels


def tracking_of(folder: Path, name: str | None = None) -> Tracking:
    """Return where a run's history is sent: to MLFLOW_TRACKING_URI, or else to an SQLite file beside its folder, which
    all runs there share. Raises UserError for a path that the address of such a file cannot have."""
    if not os.environ.get("MLFLOW_TRACKING_URI") and "?" in str(folder.parent):
        raise UserError(
            f"{folder}: MLflow's address of a database in {folder.parent} would end at its question mark; expected a "
            "folder without one, or the variable MLFLOW_TRACKING_URI"
        )
    return Tracking(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}", name=name)


def read_note(note: Path, uri: str) -> dict[str, str]:
    """Return what the note file says about the run on this server; nothing when the run is on another server."""
    fields = json.loads(note.read_text()) if note.exists() else {}
    return fields if hide_secrets(fields.get("uri", "")) == hide_secrets(uri) else {}


def write_note(note: Path, uri: str, fields: Mapping[str, str]) -> None:
    """Replace what the note file says about the run on this server."""
    write_atomic(note, json.dumps({"uri": hide_secrets(uri), **fields}))


def reserve(tracking: Tracking, note: Path) -> None:
    """Write the key of a run that does not exist yet into its note file, so that the file can be stored before."""
    if not read_note(note, tracking.uri):
        write_note(note, tracking.uri, {"key": uuid.uuid4().hex})
