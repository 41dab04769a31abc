"""Export programs that need neither timm nor eagleray: networks traced by `torch.export`, saved as such or as ONNX.

They accept any batch size. If the network can be traced without a fixed image size, they also accept images whose sides
are multiples of its stride."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from eagleray.base.errors import UserError
from eagleray.exports.positions import make_resizable
from eagleray.exports.source import Program, Source, fresh
from eagleray.models.backbone import Backbone

BATCH, SIDE = 4096, 4096  # largest batch size and image side in pixels that a program accepts
ONNX, TORCH = "backbone.onnx", "backbone.pt2"
SETTINGS = "preprocessing.json"

ONNX_PROGRAM = """\
import json

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(f"{folder}/backbone.onnx")
with open(f"{folder}/preprocessing.json") as file:
    settings = json.load(file)


def preprocess(files):
    return np.stack([pixels(ImageOps.exif_transpose(Image.open(file)).convert("RGB")) for file in files])


def pixels(image):
    size, short = settings["size"], min(image.size)
    image = image.resize([int(settings["resize"] * side / short) for side in image.size], Image.Resampling.BICUBIC)
    left, top = (round((side - size) / 2) for side in image.size)
    image = image.crop((left, top, left + size, top + size))
    values = (np.asarray(image, np.float32) / 255 - np.float32(settings["mean"])) / np.float32(settings["std"])
    return values.transpose(2, 0, 1)


def embed(images):  # (B, 3, H, W)
    return session.run(None, {"images": images})[0]  # (B, D)
"""
TORCH_PROGRAM = """\
import json

import torch
from torchvision.io import decode_image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

model = torch.export.load(f"{folder}/backbone.pt2").module()
with open(f"{folder}/preprocessing.json") as file:
    settings = json.load(file)


def preprocess(files):
    return torch.stack([pixels(decode_image(str(file), mode="RGB", apply_exif_orientation=True)) for file in files])


def pixels(image):
    image = F.resize(image, [settings["resize"]], InterpolationMode.BICUBIC, antialias=True)
    image = F.center_crop(image, [settings["size"]] * 2)
    return F.normalize(F.to_dtype(image, torch.float32, scale=True), settings["mean"], settings["std"])


def embed(images):  # (B, 3, H, W)
    with torch.inference_mode():
        return model(images)  # (B, D)
"""


class Traced(NamedTuple):
    """A traced network, and the step in pixels between the image sides that it accepts; None: only one size."""

    program: ExportedProgram
    step: int | None


class Pooled(nn.Module):
    """A module that returns the pooled vectors (B, D) of a timm model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_head(self.model.forward_features(images), pre_logits=True)


def trace(source: Source) -> Traced:
    """Trace a backbone for any batch size and, if possible, any image size. Raises UserError if it cannot be traced."""
    backbone = fresh(source.network, source.backbone)  # a copy, as make_resizable changes it
    make_resizable(backbone.model, source.network.position)
    size = source.preprocessing.size
    step = stride(backbone)
    batch = Dim("batch", min=1, max=BATCH)
    error = None
    for each in (None,) if size % step or size < 2 * step else (step, None):  # variable sides have at least two steps
        sides: dict[int, Any] = {}
        if each:
            sides = {2: each * Dim("h", min=2, max=SIDE // each), 3: each * Dim("w", min=2, max=SIDE // each)}
        # The sides differ, so that the tracer does not take them for equal.
        images = torch.randn(2, 3, *((4 * each, 6 * each) if each else (size, size)))
        try:
            with quiet():
                shapes = {"images": {0: batch, **sides}}
                return Traced(torch.export.export(Pooled(backbone.model), (images,), dynamic_shapes=shapes), each)
        except Exception as e:  # the tracer raises many kinds of errors
            error = error or e
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise UserError(f"torch.export cannot trace {source.network.name}: {why[:200]}")


def stride(backbone: Backbone) -> int:
    """Return by how many pixels an image side must grow for one more cell in the grid of the last features."""
    patch = getattr(getattr(backbone.model, "patch_embed", None), "patch_size", None)
    return int(patch[0]) if patch and hasattr(backbone.model, "num_prefix_tokens") else 32


def write_torch(source: Source, folder: Path) -> Program:
    """Write `backbone.pt2`, and return the program that loads it."""
    traced = trace(source)
    torch.export.save(traced.program, folder / TORCH)
    write_settings(source, folder)
    return Program(TORCH_PROGRAM, probes(source, traced), traced.step)


def write_onnx(source: Source, folder: Path) -> Program:
    """Write `backbone.onnx`, and return the program that loads it."""
    import onnx_ir

    traced = trace(source)
    try:
        with quiet():
            program = torch.onnx.export(traced.program, dynamo=True, verbose=False)
            assert program is not None
    except Exception as e:  # the exporter raises many kinds of errors, such as for a missing operation
        why = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise UserError(f"--to onnx: {source.network.name} cannot be written as ONNX: {why[:200]}") from None
    sides = ("height", "width") if traced.step else (source.preprocessing.size,) * 2
    graph = program.model.graph
    graph.inputs[0].shape = onnx_ir.Shape(["batch", 3, *sides])
    graph.outputs[0].shape = onnx_ir.Shape(["batch", source.backbone.dim])
    graph.outputs[0].name = "features"
    program.model.metadata_props.update({k: json.dumps(v) for k, v in source.preprocessing.plain().items()})
    program.save(folder / ONNX)
    write_settings(source, folder)
    return Program(ONNX_PROGRAM, probes(source, traced), traced.step)


def write_settings(source: Source, folder: Path) -> None:
    """Write the preprocessing of images into a file beside the program."""
    (folder / SETTINGS).write_text(json.dumps(source.preprocessing.plain(), indent=1))


def probes(source: Source, traced: Traced) -> list[tuple[int, int, int]]:
    """Return the shapes (B, H, W) of the noise images for which an export is compared with its backbone."""
    size = source.preprocessing.size
    if not traced.step:
        return [(1, size, size), (3, size, size)]
    return [(1, size, size), (2, 3 * traced.step, 5 * traced.step), (3, 6 * traced.step, 4 * traced.step)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context without the messages of PyTorch's tracer, which are meant for its developers."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def onnx_line(folder: Path) -> str:
    """Return the line of Python that loads the export in a folder."""
    return f"onnxruntime.InferenceSession({str(folder / ONNX)!r})"


def torch_line(folder: Path) -> str:
    """Return the line of Python that loads the export in a folder."""
    return f"torch.export.load({str(folder / TORCH)!r}).module()"
