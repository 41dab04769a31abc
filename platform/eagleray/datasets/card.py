"""dataset.json, the card that lies beside shards, and what can be told of shards that have none."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eagleray.base.errors import UserError
from eagleray.data.decode import BadImage, decode
from eagleray.data.index import Index, open_index
from eagleray.datasets import pack
from eagleray.datasets.stats import ASPECTS, SIDES, Census
from eagleray.storage import store

NAME = "dataset.json"
SAMPLE = 1000  # images that are decoded where there is no card
SHOWN = 64  # images on a contact sheet
MIB, GIB = 2**20, 2**30


def write(folder: str, card: dict[str, Any]) -> None:
    """Histograms with their edges, so that a reader needs no table of ours."""
    bins = {
        "sides": {"edges": SIDES, "counts": card["sides"]},
        "aspects": {"edges": ASPECTS, "counts": card["aspects"]},
    }
    pack.put_bytes(f"{folder}/{NAME}", json.dumps(card | bins, indent=1, ensure_ascii=False).encode())


def find(folder: str) -> dict[str, Any] | None:
    """The card of a folder of shards, or None. Raises UserError when the file is something else."""
    url = f"{folder.rstrip('/')}/{NAME}"
    try:
        card = json.loads(bytes(store.store(url).get(url)))
        return card | {name: card[name]["counts"] for name in ("sides", "aspects")}  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{url}: is no card of this program ({type(e).__name__}: {e})") from None


def read(folder: str) -> dict[str, Any]:
    card = find(folder)
    assert card is not None, folder
    return card


def census(card: dict[str, Any]) -> Census:
    return Census.of({name: card[name] for name in Census().plain()})


def lines(card: dict[str, Any]) -> Iterator[str]:
    """The card for a person."""
    about = census(card)
    classes = f" of {card['classes']:,} classes" if card["classes"] else ", no labels"
    yield f"{about.images:,} images{classes}, {amount(about.bytes)} in {card['shards']:,} shard(s)"
    if "sampled" in card:
        yield f"no {NAME}; what follows is of {card['sampled']:,} images, taken at random"
    else:
        yield f"source   {card['source']}, {card['listed']:,} listed; licence: {card['licence']}"
        yield f"command  {card['command']}"
    total = about.formats.total()
    yield "formats  " + ", ".join(f"{kind} {share(count, total)}" for kind, count in about.formats.most_common())
    yield f"sides    shorter side {quantiles(about.sides, SIDES)} pixels"
    yield f"shapes   width / height {quantiles(about.aspects, ASPECTS)}"
    for reason, entry in sorted(about.dropped.items(), key=lambda d: -d[1].count):
        examples = entry.examples[:3] + ["..."] * (entry.count > 3)
        yield f"dropped  {entry.count:,}: {reason} ({', '.join(examples)})"


def amount(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %"


def quantiles(counts: list[int], edges: list[Any]) -> str:
    """From the 5th to the 95th percentile with the median, as far as bins tell."""
    at = np.searchsorted(np.cumsum(counts), np.array([0.05, 0.5, 0.95]) * sum(counts))
    low, middle, high = ((edges[max(i - 1, 0)], edges[min(i, len(edges) - 1)]) for i in at)
    return f"{low[0]:g} to {high[1]:g} (5th to 95th percentile), median {middle[0]:g} to {middle[1]:g}"


def look(url: str, spare: Path) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The card of some shards, or what a sample of them tells, and images for a contact sheet, always the same."""
    index = open_index(url, spare)
    order = np.random.default_rng(0).permutation(len(index))
    folder = store.absolute(url)
    card = None if any(c in folder.rpartition("/")[2] for c in "*?[{") or folder.endswith(".tar") else find(folder)
    sampled, images = _sample(index, order[: SHOWN if card else SAMPLE])
    if card is None:
        labels = index.label[index.label >= 0]
        card = {
            "classes": len(np.unique(labels)),
            "shards": len(index.shards),
            "sampled": sampled.images,
            **sampled.plain(),
            "images": len(index),
            "bytes": int(index.size.sum()),
        }
    return card, images


def _sample(index: Index, samples: NDArray[np.int64]) -> tuple[Census, list[torch.Tensor]]:
    """A census of some samples, and the first of their images."""
    out = Census()
    images: list[torch.Tensor] = []
    shard, offset, size = index.shard, index.offset, index.size
    for sample in samples.tolist():
        url = index.shards[shard[sample]].url
        data = store.store(url).read(url, int(offset[sample]), int(size[sample]))
        try:
            image = decode(data)
        except BadImage as e:
            out.drop(str(e), index.named(sample, str(e)).key)
            continue
        out.count(data, *image.shape[1:])
        if len(images) < SHOWN:
            images.append(image)
    if not images:
        raise UserError(f"{index.shards[0].url}: none of {len(samples)} images can be decoded")
    return out, images


def command(words: list[str]) -> str:
    return "eagleray " + shlex.join(words)
