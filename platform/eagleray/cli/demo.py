"""Run `make demo`: train and evaluate a small backbone in a few minutes, on generated pictures or on the user's own."""

import sys
from collections.abc import Iterator
from pathlib import Path

from eagleray.api.pretrain import pretrain
from eagleray.base.console import out, print_error
from eagleray.base.errors import UserError
from eagleray.base.progress import progress_over
from eagleray.cli.outcome import name_of, show_run
from eagleray.datasets.shapes import CLASSES, image
from eagleray.datasets.shards import Sample, encode, write_shards

RECIPE = "mocov3_vitxs8_shapes_demo"
RUNS = Path("runs")
TRAIN, TEST = 12_000, 2_000  # numbers of generated pictures


def main(data: str | None) -> None:
    """Train the demo's recipe and print the results. Raises UserError when the data cannot be used."""
    sources = [f"data.train={data}"] if data else drawn()
    run = pretrain(RECIPE, sources, out=RUNS / (f"demo-{name_of(data)}" if data else "demo"))
    show_run(run, as_json=False)
    out.print(
        "\nWith your own images:\n"
        "  make demo DATA=<folder of images, or folder or s3:// URL of shards>\n"
        "or step by step:\n"
        "  .venv/bin/eagleray init <folder of images or shards> --gpus <GPUs>\n"
        "  .venv/bin/eagleray pretrain my_recipe.yaml out=runs/mine workers=<GPUs>",
        markup=False,
    )


def drawn() -> list[str]:
    """Return overrides that name the shards of generated pictures. The first call generates and writes them."""
    for seed, (split, count) in enumerate((("train", TRAIN), ("test", TEST))):
        place = RUNS / "shapes" / split
        if not (place / "index.parquet").exists():
            for left in place.glob("*.tar"):  # an earlier demo was killed while it wrote them
                left.unlink()
            samples = progress_over("pictures", f"drawing {split}", pictures(seed, count), count)
            write_shards(samples, str(place), size=4 * 2**20)
            out.print(f"drew {count} {split} pictures of {len(CLASSES)} classes")
    return [f"data.train={RUNS / 'shapes' / 'train'}", f"data.test={RUNS / 'shapes' / 'test'}"]


def pictures(seed: int, count: int) -> Iterator[Sample]:
    """Yield generated pictures with their classes."""
    for i in range(count):
        picture, label = image(seed, i)
        yield Sample(f"{i:06d} {CLASSES[label]}".replace(" ", "_"), "png", encode(picture), label)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
    except (UserError, RuntimeError) as e:
        print_error(str(e))
        sys.exit(2 if isinstance(e, UserError) else 1)
