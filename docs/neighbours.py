#!/usr/bin/env python
"""Draws docs/images/neighbours.png: images and their nearest neighbours by docs/backbone and by the network untrained.

`python docs/neighbours.py FOLDER` takes the folder of CIFAR-10's test shards. The queries are the first image of each
of six classes, chosen by their labels alone.
"""

import io
import sys
import tarfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

import eagleray

DOCS = Path(__file__).parent
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
QUERIES, NEAREST = (0, 1, 4, 6, 7, 8), 5
CHANNELS = [32, 64, 128, 240]  # of docs/backbone


def read(folder: Path) -> tuple[list[Image.Image], list[int]]:
    """Return the images and labels of all shards of a folder."""
    images, labels = {}, {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, kind = member.name.partition(".")
                data = tar.extractfile(member)
                assert data is not None
                if kind == "cls":
                    labels[shard, key] = int(data.read())
                elif kind in ("jpg", "jpeg", "png"):
                    images[shard, key] = Image.open(io.BytesIO(data.read())).convert("RGB")
    return [images[k] for k in labels], [labels[k] for k in labels]


def pixels(images: list[Image.Image]) -> Tensor:
    """Return normalised images (N, 3, 64, 64)."""
    x = np.stack([np.asarray(image.resize((64, 64), Image.Resampling.BICUBIC)) for image in images])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((torch.from_numpy(x) / 255 - mean) / std).permute(0, 3, 1, 2)


def nearest(model: torch.nn.Module, x: Tensor, queries: list[int]) -> list[list[int]]:
    """Return the most similar other images of each query, by the cosine of their features."""
    with torch.inference_mode():
        features = normalize(torch.cat([model(part) for part in x.split(250)]))
    scores = features[queries] @ features.T
    scores[range(len(queries)), queries] = -2
    return scores.topk(NEAREST).indices.tolist()


def draw(images: list[Image.Image], labels: list[int], queries: list[int], found: dict[str, list[list[int]]]) -> None:
    """Draw a row for each query: the image, and its neighbours by each backbone. A green frame marks its class."""
    widths = [1.0, *([0.25, *NEAREST * [1.0]] * len(found))]
    fig, axes = plt.subplots(len(queries), len(widths), figsize=(10, 4.4), width_ratios=widths)
    for axis in axes.flat:
        axis.set_axis_off()
    for row, query in enumerate(queries):
        axes[row, 0].imshow(images[query], interpolation="bicubic")
        axes[row, 0].text(-4, 16, CLASSES[labels[query]], fontsize=10, ha="right", va="center")
        for block, lists in enumerate(found.values()):
            for place, one in enumerate(lists[row]):
                axis = axes[row, 2 + block * (NEAREST + 1) + place]
                axis.imshow(images[one], interpolation="bicubic")
                axis.set_axis_on()
                axis.set_xticks([])
                axis.set_yticks([])
                for spine in axis.spines.values():
                    spine.set(color="#2a9d4a" if labels[one] == labels[query] else "#c8c8c8", linewidth=2.5)
    fig.subplots_adjust(left=0.11, right=0.995, bottom=0.01, top=0.92, wspace=0.06, hspace=0.08)
    for block, title in enumerate(found):
        fig.text(0.4 + 0.41 * block, 0.95, title, ha="center", fontsize=10)
    fig.savefig(DOCS / "images" / "neighbours.png", dpi=100)


def main(folder: Path) -> None:
    images, labels = read(folder)
    x, queries = pixels(images), [labels.index(each) for each in QUERIES]
    torch.manual_seed(0)
    untrained = timm.create_model("resnet10t", num_classes=0, channels=CHANNELS).eval()
    backbone = eagleray.load(DOCS / "backbone")
    found = {
        "nearest by the backbone, after an hour on two CPU cores": nearest(lambda x: backbone(x).pooled, x, queries),
        "nearest by the same network untrained": nearest(untrained, x, queries),
    }
    draw(images, labels, queries, found)
    for title, lists in found.items():
        right = sum(labels[one] == labels[query] for query, each in zip(queries, lists, strict=True) for one in each)
        print(f"{right} of {len(queries) * NEAREST} of the class: {title}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
