"""A folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` loads, and that goes to the Hub as it is."""

import json
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import save_file

from eagleray.base.errors import UserError
from eagleray.config import plugins
from eagleray.engine.export import describe
from eagleray.exports.source import Program, Source, with_own_grid
from eagleray.models.backbone import ANY_SIZE

PROGRAM = """\
import timm
import torch
from PIL import Image, ImageOps

model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))


def preprocess(files):
    return torch.stack([transform(ImageOps.exif_transpose(Image.open(file)).convert("RGB")) for file in files])


def embed(images):  # (B, 3, H, W)
    with torch.inference_mode():
        return model(images)  # (B, D)
"""


def write(source: Source, folder: Path) -> Program:
    """Write `config.json` and `model.safetensors`, and return the program that loads them. Raises UserError for a
    network that timm cannot build."""
    description = describe(source.network)
    name = source.network.name.partition(".")[0]
    plugin = plugins.plugin_of(source.network.name, "backbone")
    if "timm" not in description or plugin:
        raise UserError(f"--to timm-hub: timm cannot build {unknown_to_timm(source)}; --to timm is for eagleray.load")
    sized = source.backbone
    if source.network.position == "dino":  # timm would resample these position embeddings in its own way
        sized = with_own_grid(sized, source.network, source.preprocessing.size)
    family = timm.model_entrypoint(name).__module__.rpartition(".")[2]
    arguments: dict[str, Any] = {**ANY_SIZE.get(family, {}), **description["options"]}
    if own := getattr(getattr(sized.model, "patch_embed", None), "img_size", None):
        arguments["img_size"] = list(own)  # else timm takes the size of the images that are evaluated
    settings = {
        "architecture": name,
        "num_classes": 0,
        "num_features": sized.dim,
        "model_args": arguments,
        "pretrained_cfg": {"architecture": name, "num_classes": 0, **source.preprocessing.timm()},
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    state = {k: v.detach().contiguous() for k, v in sized.model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return Program(PROGRAM)


def unknown_to_timm(source: Source) -> str:
    """Name a network that timm cannot build, and the keys that make it so."""
    keys = {key: getattr(source.network, key) for key in ("norm", "stem", "patch_norm")}
    if changed := [f"{key}={value}" for key, value in keys.items() if value != "timm"]:
        return f"{source.network.name} with {' '.join(changed)}"
    plugin = plugins.plugin_of(source.network.name, "backbone")
    return f"{source.network.name}, which is {f'of the plug-in {plugin.name}' if plugin else 'ours'}"


def line(folder: Path) -> str:
    """Return one line of Python that loads the export in a folder."""
    return f"timm.create_model({f'local-dir:{folder}'!r}, pretrained=True)"
