"""`python -m eagleray.cli` is the command `eagleray`."""

from eagleray.cli.main import main

main()
