"""Export a backbone for `timm.create_model("local-dir:FOLDER", pretrained=True)` or, if timm cannot build the network,
for eagleray. An export for `timm-hub` can be uploaded to the Hugging Face Hub as it is."""

import json
from pathlib import Path

from safetensors.torch import save_file

from eagleray.base.errors import UserError
from eagleray.config import plugins
from eagleray.engine.export import any_size, describe, timm_config, to_timm
from eagleray.engine.export_files import CONFIG
from eagleray.exports.source import Program, Source, with_own_grid

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
OURS = """\
from pathlib import Path

import torch
from eagleray.data.decode import decode
from eagleray.engine.export import read_export

model, _, transform = read_export(Path(folder) / "backbone.safetensors")


def preprocess(files):
    return torch.stack([transform(decode(open(file, "rb").read(), transform.channels)) for file in files])


def embed(images):  # (B, N, H, W)
    with torch.inference_mode():
        return model.pooled(images)  # (B, D)
"""


def write(source: Source, folder: Path) -> Program:
    """Write `backbone.safetensors`, `backbone.json` and, for timm, `config.json`. Return the program to load them."""
    to_timm(source.backbone, source.network, folder, source.preprocessing)
    if source.preprocessing.channels or "timm" not in describe(source.network):
        return Program(OURS)
    plugin = plugins.plugin_of(source.network.name, "backbone")
    after = f"  # after the plug-in {plugin.name!r}, which registers the model" if plugin else ""
    return Program(PROGRAM.replace("import timm\n", f"import timm{after}\n"))


def needs_ours(source: Source) -> bool:
    """Return whether eagleray is needed to load the export: to build the network, load a plug-in or read images."""
    return bool(source.preprocessing.channels) or unknown_to_timm(source) != ""


def write_hub(source: Source, folder: Path) -> Program:
    """Write `config.json` and `model.safetensors`, and return the program that loads them. Raises UserError for a
    network that timm cannot build."""
    if unknown := unknown_to_timm(source):
        raise UserError(f"--to timm-hub: timm cannot build {unknown}; --to timm is for eagleray.load")
    network, sized = source.network, source.backbone
    if network.position == "dino":  # timm would resample DINO's positions in another way
        sized = with_own_grid(sized, network, source.preprocessing.size)
    arguments = describe(network)["options"] | any_size(sized, network)
    settings = timm_config(sized, network, arguments, source.preprocessing)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2))
    state = {k: v.detach().contiguous() for k, v in sized.model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return Program(PROGRAM)


def unknown_to_timm(source: Source) -> str:
    """Return "" if timm can build the network. Otherwise return its name, with the settings that timm does not know."""
    plugin = plugins.plugin_of(source.network.name, "backbone")
    if "timm" in describe(source.network) and not plugin:
        return ""
    keys = {key: getattr(source.network, key) for key in ("norm", "stem", "patch_norm")}
    if changed := [f"{key}={value}" for key, value in keys.items() if value != "timm"]:
        return f"{source.network.name} with {' '.join(changed)}"
    return f"{source.network.name}, which is {f'of the plug-in {plugin.name}' if plugin else 'ours'}"


def hub_line(folder: Path) -> str:
    """Return the line of Python that loads the export in a folder."""
    return f"timm.create_model({f'local-dir:{folder}'!r}, pretrained=True)"
