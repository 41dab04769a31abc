"""Seconds from making the loader to its first batch, at the start, in the middle and near the end of an epoch.

A position is computed, not read up to, so the three should be the same. Medians over alternating rounds; files that the
machine holds in its cache stay there.
"""

from collections.abc import Callable

import common
import synthetic
import torch

from eagleray.config.view import View
from eagleray.data.index import open_index
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.views.sampling import Views

PLACES = (0, 50, 99)  # per cent of an epoch
VIEW = View(size=32, count=2)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder or URL of shards; default: many small synthetic images")
    parser.add_argument("--images", type=int, default=50_000, help="synthetic ones")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="loader processes")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with synthetic.shards(args.data, images=args.images, width=64, height=48) as (url, spare):
        index = open_index(url, spare, note=common.note)
        stream = Stream(index, Views.of([VIEW]), seed=0, lanes=args.lanes, batch=args.batch)
        times = common.alternate({f"{p}": first_batch(stream, args.workers, p) for p in PLACES}, range(args.rounds + 1))
        seconds = {f"first_batch_s_{place}": s.wall for place, s in times.items()}
        ratio = {"ratio_99_over_0": seconds["first_batch_s_99"] / seconds["first_batch_s_0"]}
        size = {"images": len(index), "steps_per_epoch": stream.steps_per_epoch, "workers": args.workers}
        common.show(seconds | ratio | size | {"rounds": args.rounds}, as_json=args.json)


def first_batch(stream: Stream, workers: int, place: int) -> Callable[[object], object]:
    step = place * stream.steps_per_epoch // 100

    def run(_: object) -> object:
        """Returns the iterator too, which is then ended outside the clock."""
        loader = Loader(stream, rank=0, ranks=1, workers=workers, device=common.device())
        batches = loader.batches(step)
        batch = next(batches)
        common.wait(loader.device)
        return batches, batch

    return run


if __name__ == "__main__":
    common.run(main)
