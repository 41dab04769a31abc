"""Print the results of a run, or of prepared shards."""

import json
import os
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eagleray
from eagleray.base.console import out

if TYPE_CHECKING:
    from eagleray.api.run import Run

TIME_OVER = 124  # exit status of a run that `max_hours` ended, as that of the command `timeout`


def show_run(run: "Run", as_json: bool) -> None:
    """Print a run's results. If it has not finished, exit with TIME_OVER if `max_hours` ended it, otherwise with 1."""
    if not run.finished:
        sys.exit(TIME_OVER if run.time_over else 1)
    if as_json:
        print(json.dumps(run.summary))
    else:
        out.print(str(run), markup=False)


def name_of(data: str) -> str:
    """Return a short name for a user's data, with a hash that distinguishes folders of the same name."""
    from eagleray.storage import store

    place = store.absolute(data.rstrip("/"))
    return f"{Path(place).name.partition('.')[0].strip('*-{') or 'data'}-{zlib.crc32(os.fsencode(place)):08x}"


def show_card(source: str, origin: str, destination: str, **options: Any) -> None:
    """Prepare shards, and print the card that describes them."""
    from eagleray.datasets import card
    from eagleray.storage import store

    # The card stores the command line as the user has typed it.
    prepared = eagleray.prepare(source, origin, destination, **options, command=card.command(sys.argv[1:]))
    for line in card.lines(prepared):
        out.print(line, markup=False)
    where = store.absolute(destination).rstrip("/")
    out.print(f"{where}: shards, index.parquet and {card.NAME}", markup=False)
