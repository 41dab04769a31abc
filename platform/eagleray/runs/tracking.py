"""Choose the MLflow server that gets a run's history. The note file mlflow.json stores the run's id on each server."""

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eagleray.base.errors import UserError, hide_secrets
from eagleray.base.files import write_atomic
from eagleray.base.user import user
from eagleray.runs import layout

CREATED = ("key", "name", "parent", "inputs", "user")  # fields of a note with which a run is created


@dataclass(frozen=True)
class Tracking:
    """The MLflow server that a run's history is sent to, and the name of the run there."""

    uri: str = field(repr=False)  # may hold a password
    parent: str | None = None  # id of the run under which this one is shown
    name: str | None = None  # the run's name; by default that of its folder
    key: str | None = None  # key by which the server's run is found if the note file has no id; random by default
    user: str = ""  # name of the person who began the run


class DataInput(NamedTuple):
    """A data set that a run reads."""

    context: str  # training or test
    name: str
    digest: str  # a digest of the shards' names, sizes and contents, and of how often each is read
    kind: str  # the scheme of its URL, or local
    source: str  # JSON: its URLs
    profile: str  # JSON: images, shards and whether it has labels


def tracking_of(folder: Path, name: str | None = None) -> Tracking:
    """Return where a run's history is sent: to MLFLOW_TRACKING_URI, else to the SQLite file that its note file names,
    else to mlflow.db beside its folder, which all runs there share. Raises UserError when this path has a `?`."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}"
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        files = [known for known in _read(folder / layout.MLFLOW) if known.startswith("sqlite:///")]
        if files and Path(files[-1].removeprefix("sqlite:///")).exists():  # a trial is tracked with its sweep
            uri = files[-1]
        elif "?" in str(folder.parent):
            raise UserError(
                f"{folder}: MLflow's address of a database in {folder.parent} would end at its question mark; expected "
                "a folder without one, or the variable MLFLOW_TRACKING_URI"
            )
    fields = read_note(folder / layout.MLFLOW, uri)
    parent, title, key, who = (fields.get(kind) for kind in ("parent", "name", "key", "user"))
    return Tracking(uri, parent, title or name, key, who or user())


def read_note(note: Path, uri: str) -> dict[str, Any]:
    """Return what the note file (mlflow.json) says about the run on the MLflow server `uri`, such as its id there.
    Empty if the file is missing or names other servers only."""
    return _read(note).get(hide_secrets(uri), {})


def write_note(note: Path, uri: str, fields: Mapping[str, Any]) -> None:
    """Replace what the note file says about the run on the server `uri`.
    Entries about other servers stay, as `uri` may be a mistake that is corrected later."""
    others = {known: said for known, said in _read(note).items() if known != hide_secrets(uri)}
    write_atomic(note, json.dumps(others | {hide_secrets(uri): fields}))


def reserve(tracking: Tracking, note: Path, name: str = "", inputs: Sequence[DataInput] = ()) -> None:
    """Write the values with which a run will be created on the server, above all its key, into the file `note`.
    The field `ended`, which says that the run has ended there, is removed."""
    fields = {k: v for k, v in read_note(note, tracking.uri).items() if k != "ended"}
    if "run_id" not in fields:
        given = {"name": name, "parent": tracking.parent, "inputs": list(inputs), "user": tracking.user}
        fields = {"key": tracking.key or uuid.uuid4().hex} | fields | {k: v for k, v in given.items() if v}
    write_note(note, tracking.uri, fields)


def begin_anew(note: Path) -> None:
    """Let the run whose file `note` this is be a new run on its servers, which never replace a number or a model."""
    anew = _read(note)
    for uri, fields in anew.items():
        anew[uri] = {k: v for k, v in fields.items() if k in CREATED} | {"key": uuid.uuid4().hex}
    write_atomic(note, json.dumps(anew))


def _read(note: Path) -> dict[str, dict[str, Any]]:
    """Return what the note file says about the run, by server. The server written last is at the end."""
    return json.loads(note.read_text()) if note.exists() else {}
