"""The reader of `in_place.py` that is not ours: Hugging Face's `datasets` streams loose objects, in an environment of
its own. It answers as `rivals.py` does: seconds, images and bytes of an epoch of files as they are."""

import json
import os
import sys
import time


def main() -> None:
    from datasets import Image, load_dataset  # type: ignore[import-not-found]
    from datasets.utils.file_utils import xopen  # type: ignore[import-not-found]

    url = json.loads(sys.argv[2])["shards"][0]
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what packages print is no answer
        for _ in sys.stdin:
            images = load_dataset("imagefolder", data_files=f"{url}/**", split="train", streaming=True)
            images = images.cast_column("image", Image(decode=False))
            begin = end = time.perf_counter()
            count = size = 0
            for image in images:
                data = image["image"]["bytes"] or xopen(image["image"]["path"], "rb").read()
                count, size, end = count + 1, size + len(data), time.perf_counter()
            said = {"seconds": end - begin, "images": count, "bytes": size}
            print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
