"""A file of weights, with the line of Python that loads it in timm or, where timm cannot build the network, in
eagleray."""

from pathlib import Path

from eagleray.config import plugins
from eagleray.engine.export import describe, snippet, to_timm
from eagleray.exports import timm_hub
from eagleray.exports.source import Program, Source

PROGRAM = timm_hub.PROGRAM
OURS = """\
import eagleray
import torch
from eagleray.data.decode import decode
from eagleray.views.preprocessing import Preprocessing

model = eagleray.load(folder)
transform = Preprocessing({settings})


def preprocess(files):
    return torch.stack([transform(decode(open(file, "rb").read())) for file in files])


def embed(images):  # (B, 3, H, W)
    with torch.inference_mode():
        return model.pooled(images)  # (B, D)
"""


CHANNELS = """\
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
    """Write `backbone.safetensors` and `backbone.json`, and return the program that loads them."""
    to_timm(source.backbone, source.network, folder, source.preprocessing)
    if source.preprocessing.channels:
        return Program(CHANNELS)
    if "timm" not in describe(source.network):
        images = source.preprocessing
        return Program(OURS.format(settings=f"size={images.size}, resize={images.resize}"))
    plugin = plugins.plugin_of(source.network.name, "backbone")
    first = (
        f"import timm  # after the plug-in {plugin.name!r}, which registers the model\n" if plugin else "import timm\n"
    )
    call = snippet(folder).replace(repr(str(folder / "backbone.safetensors")), 'f"{folder}/backbone.safetensors"')
    loaded = 'timm.create_model(f"local-dir:{folder}", pretrained=True)'
    return Program(PROGRAM.replace(loaded, call).replace("import timm\n", first))


def needs_ours(source: Source) -> bool:
    """Return whether the export is loaded by eagleray, or by timm after eagleray has loaded a plug-in, or its images
    are read by eagleray."""
    return (
        bool(source.preprocessing.channels)
        or "timm" not in describe(source.network)
        or plugins.plugin_of(source.network.name, "backbone") is not None
    )


def line(folder: Path) -> str:
    """Return one line of Python that loads the export in a folder."""
    return snippet(folder)
