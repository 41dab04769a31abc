"""Images per second of the photometric operations, each alone on every image, and of DINO's views as they are drawn.

`plain` is what every image goes through: to float, and normalise. `first`, `second` and `small` are DINO's views.
Those that end in `_compiled` have a compiled colour jitter, where there is a compiler.
On the GPU where there is one, from uint8 that is on the device already.
"""

from collections.abc import Callable
from dataclasses import replace

import common
import torch

from eagleray.base import devices
from eagleray.config.view import View
from eagleray.engine.compiling import missing_compiler
from eagleray.views import photometric, sampling
from eagleray.views.sampling import Views

PLAIN = View(flip=0, jitter=0, gray=0, blur=0, solarize=0)
VIEWS = {
    "plain": PLAIN,
    "flip": replace(PLAIN, flip=1),
    "jitter": replace(PLAIN, jitter=1),
    "gray": replace(PLAIN, gray=1),
    "blur": replace(PLAIN, blur=1),
    "solarize": replace(PLAIN, solarize=1),
    **dict(zip(("first", "second", "small"), common.DINO, strict=True)),
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--images", type=int, default=256, help="in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = common.device()
    candidates = {name: operation(view, args.images, device) for name, view in VIEWS.items()}
    if missing_compiler(device) is None:
        compiled = {name: operation(VIEWS[name], args.images, device, compiled=True) for name in ("jitter", "first")}
        candidates |= {f"{name}_compiled": run for name, run in compiled.items()}
    times = common.alternate(candidates, range(args.rounds + 1))
    result: dict[str, object] = {f"{name}_images_per_s": args.images / s.wall for name, s in times.items()}
    if devices.is_accelerator(device):
        result["peak_memory_mib"] = torch.accelerator.max_memory_allocated() / 2**20
    common.show(result | {"device": device.type, "images": args.images, "rounds": args.rounds}, as_json=args.json)


def operation(view: View, images: int, device: torch.device, *, compiled: bool = False) -> Callable[[object], None]:
    pixels = torch.randint(0, 256, (images, 3, view.size, view.size), dtype=torch.uint8, device=device)
    one = Views.of([replace(view, count=1)])
    drawn = [sampling.photometrics(one, sampling.uniforms(1, seed=0, epoch=0, sample=i)) for i in range(images)]
    params = torch.cat([torch.from_numpy(p) for p in drawn])

    def run(_: object) -> None:
        photometric.apply(pixels, params, compiled=compiled)
        common.wait(device)

    return run


if __name__ == "__main__":
    common.run(main)
