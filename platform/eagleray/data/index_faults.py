"""Lists what an index leaves out: samples that cannot be used, with their reasons, and images that share a sample."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from eagleray.data import image_folder
from eagleray.data.file_names import readable
from eagleray.data.index_file import File, load, name
from eagleray.data.quarantine import BadSample
from eagleray.storage import store
from eagleray.storage.blob import Blob

EXAMPLES = 3  # samples that are named, for each reason
REASONS = 5  # reasons that are named


class Faults(NamedTuple):
    """The samples and files that the index of a folder leaves out."""

    samples: list[BadSample]
    unread: dict[str, int]  # by shard: images that are not read, as an earlier one of their sample is

    def lines(self) -> Iterator[str]:
        """Yield a line for every reason, the most frequent first, and one for images that are not read."""
        by_reason: dict[str, list[BadSample]] = {}
        for sample in self.samples:
            by_reason.setdefault(sample.reason, []).append(sample)
        reasons = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
        for reason, samples in reasons[:REASONS]:
            names = [f"{s.key or 'the shard'} in {s.shard.rpartition('/')[2]}" for s in samples[:EXAMPLES]]
            yield f"not used  {len(samples):,}: {reason} ({', '.join(names + ['...'] * (len(samples) > EXAMPLES))})"
        if rest := reasons[REASONS:]:
            yield f"not used  {sum(len(samples) for _, samples in rest):,}: {len(rest):,} other reasons"
        if self.unread:
            worst = max(self.unread, key=lambda name: self.unread[name])
            yield (
                f"not read  {sum(self.unread.values()):,} images, as another of their sample is (most in {worst});"
                " a sample is all files whose names are equal up to the first dot"
            )


def faults(files: Iterable[tuple[Blob, File]]) -> Faults:
    """Return what the index files of some shards leave out. Raises UserError when one is damaged."""
    samples, unread = list[BadSample](), {}
    for blob, file in files:
        if file.shards[file.groups[name(blob)]].bad:
            samples += unusable(blob, file)
        if count := file.unread.get(name(blob)):
            unread[name(blob)] = count
    return Faults(samples, unread)


def faults_of(url: str) -> Faults:
    """Return what the index at a URL leaves out. Raises UserError when it is damaged."""
    folder = store.parent(url)
    return faults((Blob(f"{folder}/{shard}", 0), file) for shard, file in load(url, again=False).items())


def unusable(blob: Blob, file: File) -> Iterator[BadSample]:
    """Yield the samples of a shard that cannot be used."""
    group = file.groups[name(blob)]
    rows = file.read(group, ["key", "offset", "reason"]).slice(file.shards[group].usable)
    address = image_folder.address(blob)
    return (BadSample(address, readable(row["key"]), row["offset"], row["reason"]) for row in rows.to_pylist())
