"""Samples that cannot be used: what they are, why, and when there are too many of them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.base.files import append_lines, read_lines


@dataclass(frozen=True, slots=True)
class BadSample:
    """A broken sample, or, where `key` is empty, a whole shard."""

    shard: str  # URL
    key: str
    offset: int  # bytes, of the image in the shard; -1 where there is none
    reason: str


class Quarantine:
    """`quarantine.jsonl` of a run; each sample once, over all epochs and restarts."""

    def __init__(self, path: Path, *, samples: int, limit: float) -> None:
        """Up to `limit` (a share) of `samples` may be bad."""
        self.path, self.samples, self.limit = path, samples, limit
        self.seen = {(bad["shard"], bad["key"], bad["offset"]) for bad in read_lines(path)}

    def add(self, found: Iterable[BadSample], *, write: bool = True) -> None:
        """Note what is new. Raises UserError once there are more than the limit allows."""
        new = {(b.shard, b.key, b.offset): b for b in found if (b.shard, b.key, b.offset) not in self.seen}
        self.seen |= new.keys()
        if write and new:
            append_lines(self.path, map(asdict, new.values()))
        if len(self) > self.limit * self.samples:
            raise UserError(
                f"{len(self)} of {self.samples} samples are broken, more than data.bad_limit={self.limit:g} allows; "
                f"{self.path} lists them"
            )

    def __len__(self) -> int:
        """Bad samples; a bad shard counts as one."""
        return len(self.seen)
