"""Stores the results of a clustering's stages beside its table, so that an interrupted command can continue.

A folder has only one table, whose description names the data and all settings; all stages in it are of this table."""

import io
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from eagleray.base.files import writing
from eagleray.storage.store import find, store

PREFIX = "_stage-"  # readers of Parquet folders skip names that begin with an underscore


@dataclass(frozen=True)
class Stages:
    """The files of stages in a folder or URL."""

    folder: str

    @cached_property
    def before(self) -> frozenset[str]:
        """The names of the stages that were stored when this property was first read."""
        listed = store(self.folder).list(f"{self.folder}/", PREFIX)
        return frozenset(blob.url.rpartition(PREFIX)[2].removesuffix(".npz") for blob in listed)

    def load(self, name: str) -> dict[str, Any] | None:
        """Return the arrays of a stage, None if no earlier process has finished it, or another command cleared it."""
        if name not in self.before or (data := find(self._url(name))) is None:
            return None
        with np.load(io.BytesIO(data)) as file:
            return dict(file)

    def save(self, name: str, **arrays: Any) -> dict[str, Any]:
        """Write the arrays of a stage to one file, and return them. Raises UserError when it cannot be written."""
        np.savez(buffer := io.BytesIO(), **arrays)
        with writing(f"out={self.folder}"):
            store(self.folder).write(self._url(name), buffer.getvalue())
        return arrays

    def clear(self) -> None:
        """Delete the files of all stages."""
        for blob in store(self.folder).list(f"{self.folder}/", PREFIX):
            store(self.folder).delete(blob.url)

    def _url(self, name: str) -> str:
        return f"{self.folder}/{PREFIX}{name}.npz"
