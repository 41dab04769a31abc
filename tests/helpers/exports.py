"""Backbones to export without a run, and folders of packages that hold no more than one library needs."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import torch
from helpers.recipes import SMALL

from eagleray.exports.source import Source
from eagleray.models.backbone import Backbone
from eagleray.models.network import Network
from eagleray.runs import recipe
from eagleray.views.preprocessing import Preprocessing


def source(folder: Path, name: str, *, size: int = 32, resize: int = 70, **keys: Any) -> Source:
    """Return a backbone with shaken weights, as if it were that of a run in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.yaml").write_text(SMALL)
    network = Network(name=name, **keys)
    torch.manual_seed(0)
    backbone = Backbone(name, **{k: v for k, v in keys.items() if k != "drop_path"})
    with torch.no_grad():
        for p in backbone.parameters():
            p.add_(0.02 * torch.randn_like(p))
    backbone.train()(torch.randn(4, 3, size, size))  # the statistics of batch norm
    read = recipe.load(str(folder / "small.yaml"), [f"out={folder}", f"evaluate.resize={resize}"])
    images = Preprocessing(size=size, resize=resize)
    return Source(backbone.eval(), network, images, read, str(folder), folder, None, None, True)


def only(packages: list[str], folder: Path) -> Path:
    """Fill a folder with links to the files of these distributions and of all that they need, and return it."""
    folder.mkdir(parents=True)
    waiting, known = list(packages), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in known:
            continue
        known.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of another system
            continue
        for top in {file.parts[0] for file in distribution.files or ()}:
            link, target = folder / top, Path(str(distribution.locate_file(top)))
            if top != ".." and not link.is_symlink() and target.exists():
                link.symlink_to(target)
        for need in distribution.requires or ():
            if "extra ==" not in need:
                waiting.append(re.split(r"[^\w.-]", need, maxsplit=1)[0])
    return folder
