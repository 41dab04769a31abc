"""Compare an export with its backbone on photographs, in a new process that loads the export as its users will."""

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from eagleray.base import child
from eagleray.base.errors import UserError
from eagleray.config import plugins
from eagleray.config.channels import RGB, Channel
from eagleray.data.decode import ORIENTATION, decode
from eagleray.data.tiff import write_pages
from eagleray.engine.export import TOLERANCE
from eagleray.exports.source import Source
from eagleray.views.photometric import normalise
from eagleray.views.preprocessing import Preprocessing

# Photographs in packages that Eagleray needs, and crops of them: left, top, right and bottom as shares of the sides.
PHOTOGRAPHS = (
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
)
CUTS = ((0, 0, 0.6, 0.7), (0.3, 0.1, 1, 1), (0, 0.35, 0.8, 0.9))
PYTHON = child.PYTHON
GREY = 2.05  # accepted difference of pixels, in levels of 255: libraries round differently in each pass of a resize

# Runs in a new process, which has only the library that loads the export. `program`, the example in the export's card,
# defines preprocess and embed. Programs are constants of this package, into which the modules that write exports insert
# numbers and quoted names, but nothing else of a run.
CHECK = """
import json, sys
job = json.loads(sys.argv[1])
if not job["ours"]:
    sys.modules["eagleray"] = None
for name in job["plugins"]:
    from pathlib import Path
    from eagleray.config import plugins
    plugins.load(name, Path(job["scratch"]))
import numpy as np
space = {"folder": job["folder"]}
exec(compile(job["program"], "<the card's example>", "exec"), space)
tensor = space["torch"].from_numpy if "torch" in space else np.asarray
pixels = space["preprocess"](job["photographs"])
with np.load(job["inputs"]) as inputs:
    rest = [space["embed"](tensor(inputs[name])) for name in sorted(inputs)]
np.savez(job["outputs"], np.asarray(pixels), *map(np.asarray, [space["embed"](pixels), *rest]))
"""


class Difference(NamedTuple):
    """The differences between an export and its backbone; those of features are relative to the largest feature."""

    same: float  # difference of the features that both compute from the same pixels
    whole: float  # difference of the features from image files, if both crop at the same pixel
    pixels: float  # largest difference of pixels, in levels of 255
    # number of photographs whose crop is a pixel off ours, as libraries round half a pixel down or to even numbers
    beside: int = 0

    def __str__(self) -> str:
        cut = f"; {self.beside} of 10 photographs are cut one pixel beside ours" if self.beside else ""
        return (
            f"{self.same:.1g} of the largest on equal pixels; {self.whole:.1g} from the file on, with pixels "
            f"that differ by up to {self.pixels:.1f} of 255{cut}"
        )


def photographs(folder: Path, channels: Sequence[Channel] = ()) -> list[Path]:
    """Write ten photographs into a folder, as PNG or, with `channels`, TIFF files of these. Return the paths."""
    images: list[Image.Image] = []
    for package, path in PHOTOGRAPHS:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None  # PHOTOGRAPHS are in dependencies
        with Image.open(Path(spec.origin).parent / path) as file:
            images.append(file.convert("RGB"))
    for image in images[:3]:
        w, h = image.size
        images += [image.crop((int(l * w), int(t * h), int(r * w), int(b * h))) for l, t, r, b in CUTS]
    files = [folder / f"{n}.{'tiff' if channels else 'png'}" for n in range(10)]
    if channels:
        for target, image in zip(files, images, strict=False):
            write_pages(target, values_of(np.asarray(image), channels))
        return files
    for target, image in zip(files, images, strict=False):
        image.save(target, icc_profile=None)  # no library applies a colour profile, and one warns of it
    turned = Image.Exif()
    turned[ORIENTATION] = 6  # the picture is stored on its side, as of a camera held upright
    image.save(target, icc_profile=None, exif=turned)
    return files


def values_of(rgb: NDArray[np.uint8], channels: Sequence[Channel]) -> NDArray[np.float32]:
    """Return a photograph `rgb` (H, W, 3) as values (H, W, N), in the value ranges of N `channels`."""
    mean, std = (np.array([getattr(c, name) for c in channels]) for name in ("mean", "std"))
    grey = rgb[..., np.arange(len(channels)) % RGB] / 255
    return (mean + std * (grey - 0.5) / 0.25).astype(np.float32)


def compare(
    source: Source, folder: Path, program: str, *, sizes: Sequence[tuple[int, int, int]] = (), ours: bool = False
) -> Difference:
    """Load an export in a new process with the `program` of its card, and compare its features and pixels with ours.

    Both are computed for ten photographs, and features also for noise of each of the `sizes` (B, H, W). The process
    cannot import eagleray, unless `ours` says that the program needs it. Raises UserError when the program fails, or
    the pixels or features differ."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(b, source.backbone.channels, h, w, generator=generator) for b, h, w in sizes]
    with tempfile.TemporaryDirectory() as scratch:
        inputs, outputs = Path(scratch) / "inputs.npz", Path(scratch) / "outputs.npz"
        files = photographs(Path(scratch), source.preprocessing.channels)
        np.savez(inputs, **{f"{n:03d}": x.numpy() for n, x in enumerate(noise)})  # type: ignore[arg-type]
        job: dict[str, Any] = {
            "program": program,
            "folder": str(folder.absolute()),
            "photographs": [str(f) for f in files],
        }
        job |= {"inputs": str(inputs), "outputs": str(outputs), "scratch": scratch, "ours": ours}
        plugin = plugins.plugin_of(source.network.name, "backbone") if ours else None
        packed = plugins.pack([plugin] if plugin else [])
        for sources in packed.values():
            plugins.write(Path(scratch), sources)
        job["plugins"] = list(packed)
        done = child.run_python(CHECK, [json.dumps(job)], PYTHON, text=True, cwd=scratch)
        if done.returncode:
            raise UserError(f"{folder}: cannot be loaded: {child.words(done)}")
        with np.load(outputs) as results:
            theirs, *features = (results[name] for name in results.files)
        images = [decode(f.read_bytes(), source.preprocessing.channels) for f in files]
    return difference(source, folder, images, noise, theirs, features)


def difference(
    source: Source,
    folder: Path,
    photographs: Sequence[torch.Tensor],
    noise: Sequence[torch.Tensor],
    pixels: NDArray[np.float32],
    features: Sequence[NDArray[np.float32]],
) -> Difference:
    """Compare an export with its backbone. `pixels` are what the export made of the `photographs`, each (channels, H,
    W). `features` are the export's for these pixels, then for each batch of `noise`. Raises UserError when features
    differ by more than TOLERANCE or pixels by more than GREY."""
    images = torch.stack([source.preprocessing(photo) for photo in photographs])
    if pixels.shape != tuple(images.shape):
        raise UserError(f"{folder}: its preprocessing makes {pixels.shape[2:]} pixels, not {tuple(images.shape[2:])}")
    std = torch.tensor(source.preprocessing.std).view(-1, 1, 1)
    rounded = torch.stack([cut_down(photo, source.preprocessing) for photo in photographs])
    greys = [((torch.from_numpy(pixels) - x) * std * 255).abs().amax((1, 2, 3)) for x in (images, rounded)]
    alike = greys[0] <= greys[1]
    grey = float(torch.minimum(*greys).max())
    if not grey <= GREY:
        raise UserError(f"{folder}: its preprocessing makes pixels that differ by {grey:.1f} of 255; not exported")
    wanted = [source.features(x) for x in (torch.from_numpy(pixels), *noise)]
    same = max(relative(f, w) for f, w in zip(features, wanted, strict=True))
    if not same <= TOLERANCE:
        raise UserError(f"{folder}: its features differ from ours by {same:.2g} of the largest; not exported")
    whole = relative(features[0][alike.numpy()], source.features(images[alike])) if alike.any() else float("nan")
    return Difference(same, whole, grey, int((~alike).sum()))


def cut_down(photo: torch.Tensor, settings: Preprocessing) -> torch.Tensor:
    """Prepare a photograph (N, H, W) of N channels as evaluations do, but round the corner of its crop down."""
    resized = F.resize(photo, [settings.resize], InterpolationMode.BICUBIC, antialias=True)
    top, left = ((side - settings.size) // 2 for side in resized.shape[1:])
    crop = resized[:, top : top + settings.size, left : left + settings.size]
    return normalise(crop.unsqueeze(0), torch.device("cpu"))[0]


def relative(theirs: NDArray[np.float32], ours: torch.Tensor) -> float:
    """Return the largest difference of features (B, D) relative to the largest of `ours`; infinity if shapes differ."""
    if theirs.shape != tuple(ours.shape):
        return float("inf")
    return float((torch.from_numpy(theirs) - ours).abs().max() / ours.abs().max())
