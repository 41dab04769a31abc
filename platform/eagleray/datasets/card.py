"""Read and write dataset.json, the card beside shards, and print such a card or one that `describe` has estimated."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np

from eagleray.base.errors import explained
from eagleray.base.files import NO_JSON
from eagleray.datasets.stats import ASPECTS, SIDES, ImageStats
from eagleray.storage import store

NAME = "dataset.json"
LONGEST = 10_000  # most characters of a printed line
MIB, GIB = 2**20, 2**30


def write(folder: str, card: dict[str, Any]) -> None:
    """Write a card into a folder. Bin edges are added to its histograms, so that other programs can read these."""
    from eagleray.datasets.pack import put_bytes  # imports PyTorch, which reading a card does not need

    bins = {
        "sides": {"edges": SIDES, "counts": card["sides"]},
        "aspects": {"edges": ASPECTS, "counts": card["aspects"]},
    }
    text = json.dumps(card | bins, indent=1, ensure_ascii=False)
    put_bytes(f"{folder}/{NAME}", text.encode(errors="backslashreplace"))  # escapes lone surrogates as JSON does


def find(folder: str) -> dict[str, Any] | None:
    """Return the card of a folder of shards, or None if the folder has no dataset.json.

    Raises UserError when dataset.json is not a card written by eagleray."""
    url = f"{folder.rstrip('/')}/{NAME}"
    if (text := store.find(url)) is None:
        return None
    with explained(f"{url}: not a {NAME} written by eagleray", *NO_JSON):
        card = json.loads(text)
        card |= {name: card[name]["counts"] for name in ("sides", "aspects")}
        card.pop("sampled", None)  # a key that only `describe` may set
        _check(card)
        return card  # type: ignore[no-any-return]


def _check(card: dict[str, Any]) -> None:
    """Check the types of a card's printed fields, as its file is not trusted. Raises one of the exceptions NO_JSON."""
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
    """Return the card of a folder, which must have one."""
    card = find(folder)
    assert card is not None, folder
    return card


def image_stats(card: dict[str, Any]) -> ImageStats:
    """Return the statistics that a card contains."""
    return ImageStats.from_json({name: card[name] for name in ImageStats().to_json()})


def lines(card: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that show a card to a person, each cut off after LONGEST characters."""
    for line in _lines(card):
        yield line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def _lines(card: dict[str, Any]) -> Iterator[str]:
    stats = image_stats(card)
    classes = f" of {card['classes']:,} classes" if card["classes"] else ", no labels"
    shards = f" in {card['shards']:,} shard(s)" if card["shards"] else ""  # a folder of image files has no shards
    yield f"{stats.images:,} images{classes}, {format_bytes(stats.bytes)}{shards}"
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
    """Format the share of `part` in `whole` in percent, with three significant digits."""
    return f"{100 * part / max(whole, 1):.3g} %"


def quantiles(counts: list[int], edges: list[Any]) -> str:
    """Describe a histogram by the bins of its 5th percentile, its median and its 95th percentile."""
    bins = np.searchsorted(np.cumsum(counts), np.array([0.05, 0.5, 0.95]) * sum(counts))
    low, middle, high = ((edges[max(i - 1, 0)], edges[min(i, len(edges) - 1)]) for i in bins)
    return (
        f"in bins from {low[0]:g}-{low[1]:g} to {high[0]:g}-{high[1]:g} (5th to 95th percentile), "
        f"median in {middle[0]:g}-{middle[1]:g}"
    )


def _spread(values: list[float] | None) -> str:
    """Describe `values`, which are the 5th percentile, the median and the 95th percentile; "" if there are none."""
    return f"{values[0]:.4g} to {values[2]:.4g} (5th to 95th percentile), median {values[1]:.4g}" if values else ""


def command(words: list[str]) -> str:
    """Return the command line `eagleray` with these words, quoted for a shell."""
    return "eagleray " + shlex.join(words)
