"""Read, write and print dataset.json, the card that lies beside shards, and describe shards that have none."""

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data.costs import BadImage
from eagleray.data.index import Index, open_index
from eagleray.data.index_faults import faults
from eagleray.data.pixels import read_pixels
from eagleray.datasets.stats import ASPECTS, SIDES, ImageStats
from eagleray.storage import store

NAME = "dataset.json"
SAMPLE = 1000  # images that are decoded where there is no card
LONGEST = 10_000  # characters of a line
SHEET = 64  # images on a contact sheet
MIB, GIB = 2**20, 2**30


def write(folder: str, card: dict[str, Any]) -> None:
    """Write a card into a folder.

    The edges of its histograms are added, so that other programs can read them.
    """
    from eagleray.datasets.pack import put_bytes  # loads PyTorch, which a reader of cards does without

    bins = {
        "sides": {"edges": SIDES, "counts": card["sides"]},
        "aspects": {"edges": ASPECTS, "counts": card["aspects"]},
    }
    text = json.dumps(card | bins, indent=1, ensure_ascii=False)
    put_bytes(f"{folder}/{NAME}", text.encode(errors="backslashreplace"))  # JSON escapes other bytes alike


def find(folder: str) -> dict[str, Any] | None:
    """Return the card of a folder of shards, or None if the folder has no dataset.json.

    Raises UserError when dataset.json is not a card written by eagleray.
    """
    url = f"{folder.rstrip('/')}/{NAME}"
    try:
        card = json.loads(bytes(store.store(url).get(url)))
        card |= {name: card[name]["counts"] for name in ("sides", "aspects")}
        card.pop("sampled", None)  # `describe` adds this key
        _check(card)
        return card  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{url}: not a {NAME} written by eagleray ({type(e).__name__}: {str(e)[:200]})") from None


def _check(card: dict[str, Any]) -> None:
    """Check the types of what is shown of a card, which may come from a stranger. Raises one of several errors."""
    dropped = list(card["dropped"].values())
    numbers = [card[name] for name in ("images", "bytes", "shards", "classes", "listed")]
    numbers += [*card["sides"], *card["aspects"], *card["formats"].values(), *(d["count"] for d in dropped)]
    wrong = [n for n in numbers if type(n) is not int or not 0 <= n < 2**63]
    if wrong:
        raise ValueError(f"expected a count, found {repr(wrong[0])[:80]}")
    texts = [card[name] for name in ("source", "command", "licence")]
    texts += [text for d in dropped for text in d["examples"]]
    if {type(text) for text in texts} - {str} or any(d.keys() != {"count", "examples"} for d in dropped):
        raise ValueError("expected texts")
    if (len(card["sides"]), len(card["aspects"])) != (len(SIDES) + 1, len(ASPECTS) + 1):
        raise ValueError("histograms of other lengths")


def read(folder: str) -> dict[str, Any]:
    """Return the card of a folder that is known to have one."""
    card = find(folder)
    assert card is not None, folder
    return card


def image_stats(card: dict[str, Any]) -> ImageStats:
    """Return the statistics that a card contains."""
    return ImageStats.from_json({name: card[name] for name in ImageStats().to_json()})


def lines(card: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that show a card to a person, each cut where it is longer than anybody reads."""
    for line in _lines(card):
        yield line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def _lines(card: dict[str, Any]) -> Iterator[str]:
    stats = image_stats(card)
    classes = f" of {card['classes']:,} classes" if card["classes"] else ", no labels"
    yield f"{stats.images:,} images{classes}, {format_bytes(stats.bytes)} in {card['shards']:,} shard(s)"
    if "sampled" in card:
        yield f"no {NAME}; the lines below describe {card['sampled']:,} images drawn at random"
    else:
        yield f"source   {card['source']}, {card['listed']:,} listed; licence: {card['licence']}"
        yield f"command  {card['command']}"
    total = stats.formats.total()
    yield "formats  " + ", ".join(f"{kind} {percent(count, total)}" for kind, count in stats.formats.most_common())
    exact = card.get("quantiles", {})
    yield f"sides    shorter side {_spread(exact.get('side')) or quantiles(stats.sides, SIDES)} pixels"
    yield f"shapes   width / height {_spread(exact.get('aspect')) or quantiles(stats.aspects, ASPECTS)}"
    for reason, entry in sorted(stats.dropped.items(), key=lambda d: -d[1].count):
        examples = entry.examples[:3] + ["..."] * (entry.count > 3)
        yield f"dropped  {entry.count:,}: {reason} ({', '.join(examples)})"
    yield from card.get("left_out", ())


def format_bytes(size: int) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def percent(part: int, whole: int) -> str:
    """Format a share in percent with three digits."""
    return f"{100 * part / max(whole, 1):.3g} %"


def quantiles(counts: list[int], edges: list[Any]) -> str:
    """Describe a histogram by the bins of its 5th and 95th percentile and of its median."""
    bins = np.searchsorted(np.cumsum(counts), np.array([0.05, 0.5, 0.95]) * sum(counts))
    low, middle, high = ((edges[max(i - 1, 0)], edges[min(i, len(edges) - 1)]) for i in bins)
    return (
        f"in bins from {low[0]:g}-{low[1]:g} to {high[0]:g}-{high[1]:g} (5th to 95th percentile), "
        f"median in {middle[0]:g}-{middle[1]:g}"
    )


def _spread(values: list[float] | None) -> str:
    """Describe a 5th percentile, median and 95th percentile; an empty string without them."""
    return f"{values[0]:.4g} to {values[2]:.4g} (5th to 95th percentile), median {values[1]:.4g}" if values else ""


def describe(url: str, spare: Path) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """Return the card of some shards, and images (H, W, 3) for a contact sheet; every call returns the same images.

    If the folder has no card, its entries are estimated from the index and a sample of the images. If no index can be
    written beside the shards, it is written to the folder `spare`. No images are returned of channels other than red,
    green and blue.
    """
    index = open_index(url, spare)
    order = np.random.default_rng(0).permutation(len(index))
    selected = list(store.patterns(url))
    card = find(selected[0].folder) if len(selected) == 1 and not selected[0].name else None
    left_out = list(faults(zip(index.shards, index.files, strict=True)).lines())
    card = card | {"left_out": left_out} if card and left_out else card
    if card and (card.get("options") or {}).get("--channels"):
        return card, []
    if card:
        return card, _sample(index, order[:SHEET], read_pixels)[1]
    from eagleray.data.decode import decode  # counts what training would: a second and a half of importing PyTorch

    sample, images, shapes = _sample(index, order[:SAMPLE], lambda data: decode(data).permute(1, 2, 0).numpy())
    labels = index.label[index.label >= 0]
    card = {
        "classes": len(np.unique(labels)),
        "shards": len(index.shards),
        "sampled": sample.images,
        **sample.to_json(),
        "images": len(index),
        "bytes": int(index.size.sum()),
        "quantiles": {name: np.quantile(values, [0.05, 0.5, 0.95]).tolist() for name, values in shapes.items()},
        "left_out": left_out,
    }
    return card, images


def _sample(
    index: Index, samples: NDArray[np.int64], decode: Callable[[memoryview], NDArray[np.uint8]]
) -> tuple[ImageStats, list[NDArray[np.uint8]], dict[str, list[float]]]:
    """Return the statistics of some samples, the first few of their images (H, W, 3), and the shorter side in pixels
    and the aspect ratio of each."""
    stats, shapes = ImageStats(), dict[str, list[float]](side=[], aspect=[])
    images: list[NDArray[np.uint8]] = []
    for sample in samples.tolist():
        data = index.read(sample, sample + 1)
        try:
            image = decode(data)
        except BadImage as e:
            stats.drop(str(e), index.key(sample))
            continue
        height, width = image.shape[:2]
        stats.count(data, height, width)
        shapes["side"].append(min(height, width))
        shapes["aspect"].append(width / height)
        if len(images) < SHEET:
            images.append(image)
    if not images:
        why = max(stats.dropped, key=lambda reason: stats.dropped[reason].count)
        raise UserError(f"{index.shards[0].url}: none of {len(samples)} images can be decoded: {why}")
    return stats, images, shapes


def command(words: list[str]) -> str:
    """Return a command line with these words, quoted for a shell."""
    return "eagleray " + shlex.join(words)
