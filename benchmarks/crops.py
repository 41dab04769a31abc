"""What crops on the device cost, and what they save a reader.

Photographs, by default made-up ones of 500 x 375 pixels, are decoded and cropped into DINO's ten views and MoCo v3's
two, on one thread, in alternating rounds:

decode_per_core   images per second of CPU time that are only decoded
cpu_*_per_core    decoded, cropped and resized, as a reader does with `data.crops=cpu`
torchvision*      decode and cpu_*, with JPEGs decoded by torchvision instead of simplejpeg
sent_*_per_core   decoded and packed, as a reader does with `data.crops=device`
device_*_per_s    images per second that the device crops and resizes from there, by the clock; on a CPU, where no run
                  does this, it is the speed of the twin that the tests compare with
device_jpeg_per_s images per second that a GPU's JPEG engine decodes, with other pixels
ratio_*           sent / cpu: by how much a reader is faster; `ratio_torchvision_*`: sent / torchvision's
sent_*_bytes      that an image takes on its way to the device, beside `cpu_*_bytes`

On a device that is not a CPU `peak_memory_mib` is what it took, and the crops of one batch are compared: the benchmark
fails where a pixel differs.
"""

from collections.abc import Callable, Sequence
from functools import partial

import common
import numpy as np
import torch
from loader import one_lane
from torch import Tensor
from torchvision.io import decode_jpeg

from eagleray.base import devices
from eagleray.base.errors import UserError
from eagleray.config.view import View
from eagleray.data import decode as decoding
from eagleray.data.decode import decode
from eagleray.data.decode_crops import decode_boxes
from eagleray.data.packed import Packed, Packer, on_device
from eagleray.data.reader import pixel_buffer, size_groups
from eagleray.views import sampling
from eagleray.views.crop import crop
from eagleray.views.crop_batch import crop_batch
from eagleray.views.sampling import Views

VIEWS = {"dino": Views.of(common.DINO), "mocov3": Views.of([View(size=224, scale=(0.08, 1.0), count=2)])}
File = bytes | memoryview


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder or URL of shards; default: synthetic 500 x 375 photographs")
    parser.add_argument("--images", type=int, default=64, help="in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with one_lane(args.data, args.images) as stream:
        files = [data for _, data in stream.samples(range(1), start=0, stop=1)]
        common.show(measure(files, args.rounds, common.device()), as_json=args.json)


def measure(files: Sequence[File], rounds: int, device: torch.device) -> dict[str, object]:
    candidates: dict[str, Callable[[int], object]] = {"decode": partial(decoded, files)}
    there: dict[str, Callable[[int], object]] = {}
    result: dict[str, object] = {}
    for name, views in VIEWS.items():
        send = partial(packed, files, views, Packer(views, 3))
        ours = send(0)
        ready = on_device([ours], device)
        candidates |= {
            f"cpu_{name}": partial(cropped, files, views),
            f"sent_{name}": send,
        }
        there[f"device_{name}"] = partial(resized, ready, views)
        want = cropped(files, views, 0)
        result[f"sent_{name}_bytes"] = ours.pixels.nbytes / len(files)
        result[f"cpu_{name}_bytes"] = sum(view[0].nbytes for view in want)
        check(want, resized(ready, views))
    if device.type == "cuda":
        there["device_jpeg"] = partial(by_engine, files, device)
    plain = {name: work for name, work in candidates.items() if name.startswith(("decode", "cpu"))}
    candidates |= {f"torchvision_{name}": partial(by_torchvision, work) for name, work in plain.items()}
    times = common.alternate(candidates, range(rounds + 1))
    times |= common.alternate(there, range(rounds + 1 if devices.is_accelerator(device) else 2))
    for name, seconds in times.items():
        per_core = not name.startswith("device")
        used = seconds.cpu if per_core else seconds.wall
        result[f"{name}_{'per_core' if per_core else 'per_s'}"] = len(files) / used
    result |= {f"ratio_{name}": times[f"cpu_{name}"].cpu / times[f"sent_{name}"].cpu for name in VIEWS}
    result |= {
        f"ratio_torchvision_{name}": times[f"torchvision_cpu_{name}"].cpu / times[f"sent_{name}"].cpu for name in VIEWS
    }
    if devices.is_accelerator(device):
        result["peak_memory_mib"] = torch.accelerator.max_memory_allocated() / 2**20
    return result | {"device": device.type, "images": len(files), "rounds": rounds}


def decoded(files: Sequence[File], turn: int) -> None:
    for data in files:
        decode(data)


def by_torchvision(work: Callable[[int], object], turn: int) -> None:
    kept, decoding.simplejpeg = decoding.simplejpeg, None
    try:
        work(turn)
    finally:
        decoding.simplejpeg = kept


def by_engine(files: Sequence[File], device: torch.device, turn: int) -> None:
    """Decode on the GPU, whose pixels are not those of a CPU."""
    decode_jpeg([torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files], device=device)
    common.wait(device)


def drawn(views: Views, turn: int, sample: int) -> np.ndarray:
    return sampling.uniforms(len(views.views), seed=0, epoch=turn, sample=sample)


def cropped(files: Sequence[File], views: Views, turn: int) -> list[Tensor]:
    """The crops of each view, (B, 3, S, S)."""
    out = [torch.empty(len(files), 3, size, size, dtype=torch.uint8) for size in views.size.tolist()]
    for row, data in enumerate(files):
        image, boxes = decode_boxes(data, views, drawn(views, turn, row))
        crop(image, boxes, views.views, [view[row] for view in out])
    return out


def packed(files: Sequence[File], views: Views, packer: Packer, turn: int) -> Packed:
    packer.begin(views, len(files))
    for row, data in enumerate(files):
        packer.add(*decode_boxes(data, views, drawn(views, turn, row)))
    return packer.end(pixel_buffer)


def resized(ready: Packed, views: Views, turn: int = 0) -> list[Tensor]:
    """The crops of each view on the device, (B, 3, S, S)."""
    out, first = list[Tensor](), 0
    for count, _ in size_groups(views):
        here = slice(first, first + count)
        out += crop_batch(ready.pixels, ready.boxes[here], views.views[here]).unbind()
        first += count
    common.wait(ready.pixels.device)
    return out


def check(want: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    different = sum(int((a != b.cpu()).sum()) for a, b in zip(want, got, strict=True))
    if different:
        raise UserError(f"{different} values of the device's crops differ from those of the CPU")


if __name__ == "__main__":
    common.run(main)
