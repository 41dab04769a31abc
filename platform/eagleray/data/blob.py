"""A stored file, as every store names it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blob:
    url: str
    size: int  # bytes
    tag: str = ""  # s3: the ETag; local files get theirs from `Store.tag`, when it is needed
