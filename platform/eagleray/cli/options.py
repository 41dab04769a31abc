"""Arguments and options that several commands share."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(help="recipe keys, such as optim.batch=256", metavar="[KEY=VALUE]...")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
RecipeName = Annotated[str, typer.Argument(help="a name of `eagleray list recipes`, or a YAML file", metavar="RECIPE")]
