"""Print the results of a run, or of prepared shards."""

import json
import sys
from typing import TYPE_CHECKING, Any

import eagleray
from eagleray.base.console import out

if TYPE_CHECKING:
    from eagleray.api.run import Run


def show_run(run: "Run", as_json: bool) -> None:
    """Print a run's results, or exit with 1 when the run was stopped."""
    if not run.finished:
        sys.exit(1)
    if as_json:
        print(json.dumps(run.summary))
    else:
        out.print(str(run), markup=False)


def show_card(source: str, origin: str, destination: str, **options: Any) -> None:
    """Prepare shards, and print the card that describes them."""
    from eagleray.datasets import card
    from eagleray.storage import store

    # The command as it was given goes into the card.
    prepared = eagleray.prepare(source, origin, destination, **options, command=card.command(sys.argv[1:]))
    for line in card.lines(prepared):
        out.print(line, markup=False)
    where = store.absolute(destination).rstrip("/")
    out.print(f"{where}: shards, index.parquet and {card.NAME}", markup=False)
