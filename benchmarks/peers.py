"""Ours over LightlyTrain 0.18 on one core of a CPU: views of photographs, and training steps with their input.

In turns, on the same photographs with the same kinds of views; the steps have the same network and batch. LightlyTrain
is installed by pip into an environment of its own in the cache folder at the first use. A ratio above 1 means that ours
is faster; it is of CPU seconds, `*_wall` of the clock.

input_two_view      two 224-pixel views as SimCLR's: from files to a normalised batch in float32
input_multi_crop    DINO's ten views
step_simclr         a step of SimCLR on ViT-Ti/16, with its input
step_dino           a step of DINO with ten views on ViT-Ti/16 and 65,536 prototypes, with its input
*_per_s, *_theirs_per_s     photographs per second of CPU time
view_difference     largest difference of a pixel of our views from the same in float32, in levels of 255
"""

import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
import synthetic
import torch

from eagleray.base.allocator import keep_freed_memory
from eagleray.base.errors import UserError
from eagleray.config.schedule import Progress
from eagleray.data.batch import Batch
from eagleray.data.loader import Loader
from eagleray.data.reader import Stream
from eagleray.engine.precision import Precision
from eagleray.engine.world import local
from eagleray.runs import recipe
from eagleray.runs.build import build_method, build_optimizer, make_trainer
from eagleray.runs.checks import make_plan
from eagleray.runs.rank_run import place
from eagleray.runs.recipe import Recipe
from eagleray.views import colours, photometric

RIVAL = "lightly-train==0.18.0"
RECIPES = {
    "input_two_view": "peer_simclr",
    "input_multi_crop": "peer_dino",
    "step_simclr": "peer_simclr",
    "step_dino": "peer_dino",
}
CPU = torch.device("cpu")
Turn = Callable[[], common.Seconds]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", help="folder or URL of shards; default: synthetic 500 x 375 photographs")
    parser.add_argument("--images", type=int, default=256, help="of the data")
    parser.add_argument("--batch", type=int, default=32, help="photographs of a batch of views")
    parser.add_argument("--step-batch", type=int, default=16, help="photographs of a training step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `pretrain` does
    python = common.environment(RIVAL)
    with synthetic.shards(args.data, images=args.images) as (url, spare), TemporaryDirectory() as folder:
        result: dict[str, Any] = {}
        for what in args.only:
            batch = args.step_batch if what.startswith("step") else args.batch
            ours = Ours(what, url, spare, batch)
            if not list(Path(folder).iterdir()):
                write_files(ours.stream, Path(folder), args.images)
            with Theirs(python, what, folder, batch) as theirs:
                result |= compared(what, ours.turn, theirs, args.rounds, batch)
            if what.startswith("input"):
                key = "view_difference"
                result[key] = max(result.get(key, 0.0), ours.difference())
        sizes = {"images": args.images, "batch": args.batch, "step_batch": args.step_batch, "rounds": args.rounds}
        common.show(result | sizes | {"rival": RIVAL}, as_json=args.json)


def write_files(stream: Stream, folder: Path, images: int) -> None:
    """Write the stream's first photographs as files, which LightlyTrain reads."""
    for number, (_, data) in zip(range(images), stream.samples(range(stream.lanes), start=0), strict=False):
        (folder / f"{number:06d}.jpg").write_bytes(data)


def compared(what: str, ours: Turn, theirs: Turn, rounds: int, batch: int) -> dict[str, float]:
    """Medians over rounds in which each has its turn; the first round warms up."""
    rows: list[tuple[common.Seconds, common.Seconds]] = []
    for turn in range(rounds + 1):
        if turn % 2:
            rows.append((ours(), theirs()))
        else:
            second = theirs()
            rows.append((ours(), second))
    sides = zip(*rows[1:], strict=True)
    us, them = (common.Seconds(*map(statistics.median, zip(*side, strict=True))) for side in sides)
    return {
        what: them.cpu / us.cpu,
        f"{what}_wall": them.wall / us.wall,
        f"{what}_per_s": batch / us.cpu,
        f"{what}_theirs_per_s": batch / them.cpu,
    }


class Ours:
    """Our batches or steps, made in this process without a loader process."""

    def __init__(self, what: str, url: str, spare: Path, batch: int) -> None:
        lanes = math.gcd(batch, 8)
        keys = [f"data.train={url}", f"optim.batch={batch}", f"data.lanes={lanes}", "workers=0", f"out={spare / 'run'}"]
        chosen = recipe.load(str(Path(__file__).with_name("recipes") / f"{RECIPES[what]}.yaml"), keys)
        self.stream = make_plan(chosen, note=common.note).stream
        self.loader = Loader(self.stream, rank=0, ranks=1, workers=0, device=CPU)
        self.work: Iterator[Any] = self.batches() if what.startswith("input") else self.steps(chosen)

    def batches(self) -> Iterator[Batch]:
        for part in self.loader.stream.parts(range(self.stream.lanes), start=0):
            yield self.loader.assemble((part,))[0]

    def steps(self, r: Recipe) -> Iterator[Any]:
        method = build_method(r)
        place(method, r, local())
        middle = Progress(1000 * r.optim.epochs // 2, 1000, r.optim.epochs)
        batches = ((middle, batch) for batch in self.batches())
        precision = Precision.of(r.precision, local().device)
        return make_trainer(r, method, build_optimizer(r, method), precision).steps(batches)

    def turn(self) -> common.Seconds:
        wall, cpu = time.perf_counter(), time.process_time()
        next(self.work)
        return common.Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def difference(self) -> float:
        """The largest difference of a step's views from those that an accelerator would get, in levels."""
        lanes = range(self.stream.lanes)
        plain = next(self.stream.parts(lanes, start=0))
        done = self.loader.assemble((next(self.loader.stream.parts(lanes, start=0)),))[0].views
        pixels = [view for group in plain.pixels for view in group]
        deviation = torch.tensor(colours.STD).view(3, 1, 1)
        distances = (
            (photometric.apply(crops, params) - views) * deviation
            for crops, params, views in zip(pixels, plain.params, done, strict=True)
        )
        return 255 * max(float(d.abs().max()) for d in distances)


class Theirs:
    """A process of `peers_lightly_train.py`."""

    def __init__(self, python: Path, what: str, folder: str, batch: int) -> None:
        program = Path(__file__).with_name("peers_lightly_train.py")
        command = [str(python), str(program), what, folder, str(batch)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Theirs":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def __call__(self) -> common.Seconds:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"the process of {RIVAL} has ended; what it said is above")
        return common.Seconds(**json.loads(line))


if __name__ == "__main__":
    common.run(main)
