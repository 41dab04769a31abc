"""Oxford-IIIT Pets: images named after their breed, and lists of the splits."""

from functools import partial

from eagleray.datasets.sources import files, lists
from eagleray.datasets.sources.item import Listing, is_image
from eagleray.datasets.sources.options import PrepareOptions
from eagleray.datasets.sources.source import Dataset, Source, SourceFiles
from eagleray.storage.blob import Blob

LINE = r"(?P<name>\S+) (?P<label>\d+) \d+ \d+"
CLASSES = range(1, 38)


def pets(options: PrepareOptions) -> SourceFiles:
    """Find images/ and annotations/ in the folder."""
    name = f"{options.split or 'trainval'}.txt"
    tables = [b for b in files.list_folder(f"{options.origin}/annotations/") if b.url.endswith(f"/{name}")]
    images = [b for b in files.list_tree(f"{options.origin}/images") if is_image(b.url)] if tables else []
    if not images:
        missing = "images/Abyssinian_1.jpg in it" if tables else f"annotations/{name} in it"
        raise files.missing_error(options.origin, missing)
    return SourceFiles([*tables, *images], partial(_listing, options, tables[0], images))


def _listing(options: PrepareOptions, table: Blob, images: list[Blob]) -> Listing:
    rows = list(lists.read_labels(table.url, LINE, "a name, its class from 1 to 37, species and breed", CLASSES))
    breeds = {label: name.rpartition("_")[0] for name, label in rows}
    blobs = {files.relative_path(b, f"{options.origin}/images"): b for b in images}
    items = lists.match_items(((f"{name}.jpg", label - 1) for name, label in rows), blobs)
    return Listing(items, [breeds.get(i, "") for i in range(1, max(breeds, default=0) + 1)])


SOURCES = {
    "pets": Source(
        pets,
        licence="CC BY-SA 4.0; the images belong to their owners",
        dataset=Dataset(
            "Oxford-IIIT Pets",
            short="pets",
            classes=len(CLASSES),
            splits={"trainval": 3_680, "test": 3_669},
            obtain="Download images.tar.gz and annotations.tar.gz from robots.ox.ac.uk/~vgg/data/pets",
            contents="`images/`, `annotations/`",
        ),
    )
}
