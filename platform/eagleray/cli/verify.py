"""Define the command verify, which checks that an export has not changed since it was written."""

import json
from typing import Annotated

import typer

import eagleray
from eagleray.base.console import out
from eagleray.cli.options import Json


def verify(
    export: Annotated[str, typer.Argument(help="Folder or s3:// URL of an export, such as RUN/export.")],
    as_json: Json = False,
) -> None:
    """Verify that an export is as it was written: its files, its tensors, and what they say of the run and licences."""
    from eagleray import config

    verified = eagleray.verify(export)
    if as_json:
        about = {"sha256": verified.sha256, "conditions": verified.conditions}
        print(json.dumps(about | {"facts": config.to_plain(verified.facts)}))
        return
    for line in (*verified.checks, *([f"licence   {verified.conditions}"] if verified.conditions else [])):
        out.print(line, markup=False, soft_wrap=True)
