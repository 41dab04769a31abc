"""Decode JPEGs and crop their views as NVIDIA DALI's CPU pipeline does, for benchmarks/decode.py, whose environment for
it has nothing of ours. Reads a JSON object a line, of the files and the views, and prints CPU seconds per image."""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types

ASPECT = (3 / 4, 4 / 3)


@pipeline_def
def pipeline(files: list[np.ndarray], views: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Return each view of each image: decoded as a whole once, then a random resized crop, as training does."""
    images = fn.decoders.image(fn.external_source(lambda: files, batch=True), output_type=types.RGB)
    return tuple(
        fn.random_resized_crop(
            images, size=view["size"], random_area=view["scale"], random_aspect_ratio=ASPECT, antialias=True
        )
        for view in views
    )


def seconds(task: dict[str, Any]) -> float:
    """Return the median CPU time per image, of all threads, of some rounds after one that warms up."""
    files = [np.frombuffer(Path(name).read_bytes(), np.uint8) for name in task["files"]]
    pipe = pipeline(files, task["views"], batch_size=len(files), num_threads=1, device_id=None, prefetch_queue_depth=1)
    pipe.build()
    times = []
    for _ in range(task["rounds"] + 1):
        began = time.process_time()
        pipe.run()
        times.append((time.process_time() - began) / len(files))
    return statistics.median(times[1:])


for line in sys.stdin:
    print(seconds(json.loads(line)), flush=True)
