"""Say which commits have a subject of more than 72 characters, which tools cut off; figures go into the body.

    python docs/subjects.py

Commits before BASE were made before this rule.
"""

import subprocess
import sys
from collections.abc import Iterator

BASE = "c18840120321"
LONGEST = 72  # characters


def too_long(base: str = BASE) -> Iterator[str]:
    """Yield a line for each commit since the base whose subject is too long; none where git does not know the base."""
    command = ["git", "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        subject = line.partition(" ")[2]
        if len(subject) > LONGEST:
            yield f"{line}: {len(subject)} characters; a commit's subject has at most {LONGEST}"


if __name__ == "__main__":
    lines = list(too_long())
    print("\n".join(lines), file=sys.stderr, end="\n" * bool(lines))
    sys.exit(bool(lines))
