"""Lists what an index leaves out: unusable samples with their reasons, further images of a sample, and members of
shards that belong to no sample."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from eagleray.data import image_folder
from eagleray.data.file_names import readable
from eagleray.data.index_file import File, load, name
from eagleray.data.quarantine import BadSample
from eagleray.data.tar_headers import ARCHIVE
from eagleray.data.tar_scan import UNLABELLED, UNREAD, counted
from eagleray.storage import store
from eagleray.storage.blob import Blob

EXAMPLES = 3  # most samples named per reason
REASONS = 5  # most reasons named


class Faults(NamedTuple):
    """The samples and files that the index of a folder leaves out."""

    samples: list[BadSample]
    passed: dict[str, Counter[str]]  # numbers of skipped members, by shard and kind

    def lines(self) -> Iterator[str]:
        """Yield a line for each reason, the most frequent first, and then the lines of `lines_of_passed`."""
        by_reason: dict[str, list[BadSample]] = {}
        for sample in self.samples:
            by_reason.setdefault(sample.reason, []).append(sample)
        reasons = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
        for reason, samples in reasons[:REASONS]:
            names = [f"{s.key or 'the shard'} in {s.shard.rpartition('/')[2]}" for s in samples[:EXAMPLES]]
            yield f"not used  {len(samples):,}: {reason} ({', '.join(names + ['...'] * (len(samples) > EXAMPLES))})"
        if rest := reasons[REASONS:]:
            yield f"not used  {sum(len(samples) for _, samples in rest):,}: {len(rest):,} other reasons"
        yield from lines_of_passed(self.passed)


def lines_of_passed(passed: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Yield a line for each: skipped images, labels that cannot be read, members that belong to no sample, and archives
    behind the end of another archive. `passed` has their numbers, by shard and kind."""
    total = sum(passed.values(), Counter[str]())

    def most(*kinds: str) -> str:
        return max(passed, key=lambda shard: sum(passed[shard][kind] for kind in kinds))

    if count := total.pop(UNREAD, 0):
        yield (
            f"not read  {count:,} images, as another of their sample is (most in {most(UNREAD)});"
            " a sample is all files whose names are equal up to the first dot"
        )
    if count := total.pop(UNLABELLED, 0):
        yield (
            f"no label  {count:,} images, as their .cls is not a whole number from 0 on (most in {most(UNLABELLED)})"
        )
    joined = total.pop(ARCHIVE, 0)
    if total:
        yield f"not read  {counted(total)}, which are no samples (most in {most(*total)})"
    if joined:
        yield f"joined    {joined:,} archives behind the end of another one, read as well (most in {most(ARCHIVE)})"


def faults(files: Iterable[tuple[Blob, File]]) -> Faults:
    """Return the faults in the index files of some shards. Raises UserError when an index file is damaged."""
    samples, passed = list[BadSample](), {}
    for blob, file in files:
        if file.shards[file.groups[name(blob)]].bad:
            samples += unusable(blob, file)
        if counts := file.passed.get(name(blob)):
            passed[name(blob)] = counts
    return Faults(samples, passed)


def faults_of(url: str) -> Faults:
    """Return the faults in the index at a URL. Raises UserError when the index is damaged."""
    folder = store.parent(url)
    return faults((Blob(f"{folder}/{shard}", 0), file) for shard, file in load(url, again=False).items())


def unusable(blob: Blob, file: File) -> Iterator[BadSample]:
    """Yield the unusable samples of a shard, each with its reason."""
    group = file.groups[name(blob)]
    rows = file.read(group, ["key", "offset", "reason"]).slice(file.shards[group].usable)
    address = image_folder.address(blob)
    return (BadSample(address, readable(row["key"]), row["offset"], row["reason"]) for row in rows.to_pylist())
