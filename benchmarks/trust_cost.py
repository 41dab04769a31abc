"""What the checks of strangers' data and the flushing to the disk cost, beside an older commit.

`--before` names a commit with the rooms of today (5baad4b and later). Its package is taken from the git history. Each
round runs every part in a process of its own, of the older commit and of this checkout in turns. The ratio of a round
is this one's time over the older one's, and the median over the rounds counts. CPU time is that of all threads.

loader    read, decode and crop an epoch of DINO's ten views, one thread
index     index the shards
prepare   write shards, index and card from a folder of images

PART_slower   share by which CPU time grew, negative where it shrank; PART_slower_wall by the clock on the wall
"""

import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import common
import synthetic

from eagleray.base.errors import UserError

PARTS = ("loader", "index", "prepare")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--before", required=True, metavar="COMMIT", help="the older commit")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        trees = {"before": folder / "before" / "platform", "now": common.ROOT / "platform"}
        unpack(args.before, folder / "before")
        synthetic.write(folder / "shards", images=args.images)
        for i in range(args.images):
            path = folder / "images" / f"class{i % 8}" / f"{i:06d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(synthetic.picture(i % 64) + b"%d" % i)  # no two files are equal
        ratios: dict[str, list[float]] = {}
        rates: dict[str, list[float]] = {}
        for number, part in itertools.product(range(args.rounds + 1), PARTS):  # the first round fills what is warm
            order = sorted(trees, reverse=bool(number % 2))
            times = {name: measured(part, trees[name], folder, f"{number}-{name}", args.images) for name in order}
            if not number:
                continue
            for i, key in enumerate(("slower", "slower_wall")):
                ratios.setdefault(f"{part}_{key}", []).append(times["now"][i] / times["before"][i])
            for name in trees:
                rates.setdefault(f"{part}_{name}_per_core", []).append(args.images / times[name][0])
            common.note(f"round {number} of {args.rounds}: {part} {times}")
        result = {name: statistics.median(values) - 1 for name, values in ratios.items()}
        result |= {name: statistics.median(values) for name, values in rates.items()}
        common.show(result | {"images": args.images, "rounds": args.rounds, "before": args.before}, as_json=args.json)


def unpack(commit: str, folder: Path) -> None:
    """Write the package of a commit into a folder."""
    command = ["git", "-C", str(common.ROOT), "archive", "--format=zip", commit, "platform"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"--before {commit}: {done.stderr.decode().strip()}")
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder)


def measured(part: str, tree: Path, folder: Path, name: str, images: int) -> tuple[float, float]:
    """Return the CPU and wall seconds of a part in a process that imports eagleray from a tree."""
    script = str(Path(__file__).with_name("trust_cost_parts.py"))
    command = [sys.executable, script, part, str(folder), name, str(images)]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / name)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise UserError(f"{part} of {tree}: {done.stderr.strip()[-500:]}")
    cpu, wall = json.loads(done.stdout.splitlines()[-1])
    return cpu, wall


if __name__ == "__main__":
    common.run(main)
