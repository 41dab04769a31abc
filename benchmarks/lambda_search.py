"""Whether the search for the probe's lambda ends where a sweep over all its steps does, and what it saves: on features
of a backbone, a fifth of each set held out.

lambda_search, lambda_sweep       what either finds
fits_search, fits_sweep           classifiers fitted for it
seconds_search, seconds_sweep     CPU time
top1_search, top1_sweep           percent on the images held out
"""

import functools
import time
from pathlib import Path

import common
import numpy as np

from eagleray.data.index import open_index
from eagleray.evaluation.target import load_target
from eagleray.protocols.features import extract_pooled, labelled_samples
from eagleray.protocols.logistic import STEPS, Problem, search, strength, validation_rows, validation_score


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("backbone", help="as of `eagleray evaluate`")
    parser.add_argument("train", nargs="+", help="labelled shards")
    args = parser.parse_args()
    one = load_target(args.backbone)
    for url in args.train:
        index = open_index(url, Path.cwd())
        size, resize = one.settings.size, one.settings.resize
        x, y = (
            t.numpy() for t in extract_pooled(one.backbone, index, labelled_samples(index), size=size, resize=resize)
        )
        common.show({"data": Path(url).parent.name, "images": len(y)} | measure(x, y), as_json=args.json)


def measure(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Of features (n, D) and classes (n,)."""
    y, held = np.unique(y, return_inverse=True)[1], validation_rows(y, 0)
    fitting, checking = (Problem(x[rows], y[rows], int(y.max()) + 1) for rows in (~held, held))
    score = functools.cache(lambda step: validation_score(fitting, checking, step, "top1"))
    out: dict[str, float] = {}
    for which, find in (("search", search), ("sweep", lambda score: max(range(STEPS + 1), key=score))):
        score.cache_clear()
        began = time.process_time()
        step = find(score)
        out |= {f"lambda_{which}": strength(step), f"fits_{which}": score.cache_info().currsize}
        out |= {f"seconds_{which}": round(time.process_time() - began, 1), f"top1_{which}": score(step)[1]}
    return out


if __name__ == "__main__":
    common.run(main)
