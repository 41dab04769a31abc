"""What is asked of `eagleray prepare`."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from eagleray.storage import store


@dataclass(frozen=True, kw_only=True)
class Job:
    source: str
    origin: str
    destination: str
    split: str = ""
    labels: str = ""  # ground truth of ImageNet's validation images
    images: str = ""  # where Open Images' files are
    column: str = ""  # of a Parquet file's images
    size: int = 128  # MiB of source bytes per shard
    max_side: int = 0  # pixels; 0: none
    min_side: int = 0
    dedup: bool = False
    seed: int = 0

    def resolved(self) -> "Job":
        """With absolute places, none of which ends in a slash."""
        places = ("origin", "destination", "labels", "images")
        given: dict[str, Any] = {name: getattr(self, name) for name in places}
        given = {name: url and store.absolute(url).rstrip("/") for name, url in given.items()}
        return replace(self, **given)

    def options(self) -> dict[str, Any]:
        """What the shards depend on."""
        names = {"origin": "FROM", "source": "SOURCE"}
        return {names.get(k) or "--" + k.replace("_", "-"): v for k, v in asdict(self).items() if k != "destination"}
