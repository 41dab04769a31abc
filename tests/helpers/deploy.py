"""Where the files of deploy/ and the tools that read them are."""

import sys
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
TOOLS = Path(sys.executable).parent  # of this environment
