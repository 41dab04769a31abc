"""Hatchling's hook for the metadata of the wheel: README.md with links that work away from the repository."""

import posixpath
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)(?=\))")


class Readme(MetadataHookInterface):
    """The project's README, whose relative links become links into the repository that `project.urls` names."""

    def update(self, metadata: dict[str, Any]) -> None:
        base = metadata["urls"]["Source"]
        text = (Path(self.root) / "README.md").read_text()
        text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:)([^)\s]+)(?=\))", lambda m: f"{m[1]}{base}/raw/main/{m[2]}", text)
        text = LINK.sub(lambda m: f"{base}/blob/main/{posixpath.normpath(m[1])}", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
