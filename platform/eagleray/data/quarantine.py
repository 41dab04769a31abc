"""Records broken samples in `quarantine.jsonl`, and ends a run that has too many of them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from eagleray.base.errors import UserError
from eagleray.base.files import JsonLines, read_lines
from eagleray.data.tar_scan import NO_IMAGE


@dataclass(frozen=True, slots=True)
class BadSample:
    """A broken sample, or a broken shard if `key` is empty."""

    shard: str  # URL
    key: str
    offset: int  # position of the image in the shard in bytes; -1 without an image
    reason: str

    @property
    def without_image(self) -> bool:
        """Return whether the sample is not broken but has only texts, such as those of a failed download."""
        return self.reason.startswith(NO_IMAGE)


def broken(samples: Iterable[BadSample]) -> int:
    """Return how many samples are broken, without those that merely lack an image."""
    return sum(not sample.without_image for sample in samples)


class Quarantine:
    """Records each broken sample of a run once, over all epochs and restarts."""

    def __init__(self, path: Path | None, *, samples: int, limit: float) -> None:
        """`limit` is the largest fraction of the `samples` that may be broken. Samples without an image count neither
        as broken nor in `samples`. Without `path`, the records are only in memory."""
        self.path, self.samples, self.limit = path, samples, limit
        self._lines = JsonLines(path) if path else None
        names = {f.name for f in fields(BadSample)}
        lines = [line for line in (read_lines(path) if path else ()) if line.keys() == names]
        self.bad = {_identity(b): b for b in (BadSample(**line) for line in lines)}

    def add(self, bad_samples: Iterable[BadSample], *, write: bool = True) -> None:
        """Record the samples that are new. Raises UserError when more samples are broken than the limit allows."""
        new = {_identity(b): b for b in bad_samples if _identity(b) not in self.bad}
        self.bad |= new
        if self._lines and write:
            self._lines.log(*map(asdict, new.values()))
        most = self.limit * self.samples
        if len(self.bad) > most and len(self) > most:
            first = next(b for b in self.bad.values() if not b.without_image)
            key = f"{'data.' if self.path else ''}bad_limit={self.limit:g}"
            where = f"the first is {first.key} in {first.shard}: {first.reason}"
            raise UserError(
                f"{len(self)} of {self.samples} samples are broken, more than {key} allows; "
                + (f"{self.path} lists them" if self.path else where)
            )

    def __len__(self) -> int:
        """Return the number of broken samples. A broken shard counts as one."""
        return broken(self.bad.values())


def _identity(sample: BadSample) -> tuple[str, str, int]:
    return sample.shard, sample.key, sample.offset
