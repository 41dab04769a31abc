"""The options of one `eagleray prepare` command."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from eagleray.base.numbers_given import whole
from eagleray.storage import store


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The settings of `eagleray prepare`: its source, its destination and how to write the shards.

    The defaults are those of the command line."""

    source: str
    origin: str
    destination: str
    split: str = ""
    labels: str = ""  # ground truth of ImageNet's validation images
    images: str = ""  # folder of Open Images' image files
    column: str = ""  # the column of images in a Parquet file
    where: str = ""  # expression of SQL: of indexed shards, the samples for which it is true
    columns: str = ""  # Parquet or CSV file with columns for it
    size: int = 128  # MiB of source bytes per shard
    max_side: int = 0  # pixels; 0: no limit
    min_side: int = 0  # pixels
    channels: int = 0  # 0 means red, green and blue
    dedup: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UserError for numbers that are none or too small."""
        for name, least in {"size": 1, "max_side": 0, "min_side": 0, "channels": 0, "seed": 0}.items():
            object.__setattr__(self, name, whole(name, getattr(self, name), least))

    def resolved(self) -> "PrepareOptions":
        """Return a copy whose paths and URLs are absolute and have no slash at the end."""
        names = ("origin", "destination", "labels", "images", "columns")
        urls: dict[str, Any] = {name: getattr(self, name) for name in names}
        urls = {name: url and store.absolute(url).rstrip("/") for name, url in urls.items()}
        return replace(self, **urls)

    def identity(self) -> dict[str, Any]:
        """Return the options that the bytes of the shards depend on, by their names on the command line."""
        names = {"origin": "FROM", "source": "SOURCE"}
        kept = {k: v for k, v in asdict(self).items() if k != "destination"}
        return {names.get(k) or "--" + k.replace("_", "-"): v for k, v in kept.items()}
