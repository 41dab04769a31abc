"""Define the command forget, which lets a run forget images."""

from typing import Annotated

import typer

import eagleray
from eagleray.base.console import out as console
from eagleray.cli.options import Plugins
from eagleray.data.file_names import readable

SHOWN = 5  # largest number of keys without an image that are printed


def forget(
    run: Annotated[str, typer.Argument(help="Folder or s3:// URL of a run that has finished or was stopped.")],
    samples: Annotated[
        str,
        typer.Option(help="Parquet or CSV file with the images: a column key, and shard where keys are not unique."),
    ] = "",
    where: Annotated[str, typer.Option(help="SQL expression that is true for the images, like data.train.where.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would happen, and change nothing.")] = False,
    plugin: Plugins = None,
) -> None:
    """Take images out of a run: it goes back to before it used them, and continues as if it had never read them.

    This deletes later checkpoints, exports and pictures of the run. After an interruption, repeat the command."""
    found = eagleray.forget(run, samples or None, where=where, dry_run=dry_run, plugins=plugin or ())
    before, missing, later = found["forgotten"], [*map(readable, found["not_found"])], found["checkpoints"]
    known = f", of which {before} were forgotten before" * bool(before)
    lines = [f"images    {found['images']} of the training data{known}"]
    if missing:
        lines.append(f"not found {len(missing)} keys: {', '.join(missing[:SHOWN])}" + ", ..." * (len(missing) > SHOWN))
    if found["used"] is None:
        lines.append(f"first use none in {found['taken']} steps, so no step is repeated")
    else:
        at = f"step {found['used']} of {found['taken']}" if found["used"] else "the measurements at the start"
        back = f"the checkpoint of step {found['step']}" if found["step"] else "the beginning: no checkpoint is older"
        names = f"{len(later)} later checkpoints ({', '.join(later)}), " * bool(later)
        lines += [
            f"first use {at}",
            f"goes back to {back}",
            f"deletes   {names}exports, summary and pictures; histories end at step {found['step']}",
        ]
    lines.append("nothing was changed: --dry-run" if dry_run else f"listed in {run.rstrip('/')}/forgotten.jsonl")
    if found["used"] is not None:
        lines.append(f"continue  eagleray pretrain {run}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
