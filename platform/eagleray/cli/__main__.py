"""Run the command `eagleray` as `python -m eagleray.cli`."""

from eagleray.cli.main import main

main()
