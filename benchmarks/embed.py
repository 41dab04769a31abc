"""How near `eagleray embed` comes to the rate of the training loader where the backbone costs nothing.

    python benchmarks/embed.py [--data SHARDS] [--images 2000] [--size 224] [--rounds 5] [--json]

The features are the mean colours of an image, repeated to `--dim` numbers. In turns, all images are embedded into a new
folder, from the shards to Parquet files, and are read once as training reads them: one random crop of the same size,
from bytes to normalised pixels. Both read in this process.

rate_of_loader      images per second of CPU time of embed, as a share of the loader's
images_per_s        both rates, of CPU time of all threads; medians over rounds
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import common
import synthetic
import torch
from torch import Tensor

from eagleray.base import devices
from eagleray.config.view import View
from eagleray.data.index import Index, open_index
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.evaluation.embed import embed
from eagleray.evaluation.target import Target, load_target
from eagleray.views.sampling import Views


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder or URL of shards; default: synthetic 500 x 375 photographs")
    parser.add_argument("--images", type=int, default=2000, help="of the synthetic photographs")
    parser.add_argument("--size", type=int, default=224, help="of the crops")
    parser.add_argument("--dim", type=int, default=384, help="numbers of a feature")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with synthetic.shards(args.data, images=args.images) as (url, spare), TemporaryDirectory() as folder:
        index = open_index(url, spare, note=common.note)
        target = without_forward(args.dim)

        def embedded(turn: int) -> None:
            out = str(Path(folder) / str(turn))
            embed(target, url, out, kind="pooled", size=args.size, resize=args.size * 8 // 7, note=common.note)

        work: dict[str, Callable[[int], None]] = {"embed": embedded, "loader": lambda _: read(index, args.size)}
        times = common.alternate(work, range(args.rounds + 1))
        result = {
            "rate_of_loader": times["loader"].cpu / times["embed"].cpu,
            "images_per_s": {name: round(len(index) / spent.cpu, 1) for name, spent in times.items()},
            "images": len(index),
            "size": args.size,
            "dim": args.dim,
        }
    common.show(result, as_json=args.json)


def without_forward(dim: int) -> Target:
    """Return a target whose features are the mean colours of an image, repeated."""
    target = load_target("untrained:timm:vit_small_patch16_224")

    def pooled(images: Tensor) -> Tensor:
        return images.mean((2, 3)).repeat(1, dim // 3)

    target.backbone.pooled = pooled  # type: ignore[method-assign]
    return target


def read(index: Index, size: int) -> None:
    """Read all images as training does."""
    batch = min(256, len(index))
    stream = Stream(index, Views.of((View(size=size, jitter=0.0, gray=0.0),)), seed=0, lanes=1, batch=batch)
    loader = Loader(stream, rank=0, ranks=1, workers=0, device=devices.CPU)
    deque(loader.batches(0, len(index) // batch), maxlen=0)


if __name__ == "__main__":
    common.run(main)
