"""Say which commits have a subject of more than 72 characters, which tools cut off; figures go into the body.

    python docs/subjects.py

Commits whose author's date is before SINCE were made before this rule.
"""

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime

SINCE = datetime.fromisoformat("2026-11-29T11:00:00+00:00")
LONGEST = 72  # characters


def too_long(since: datetime = SINCE) -> Iterator[str]:
    """Yield a line for each commit since then whose subject is too long; none where there is no git repository."""
    command = ["git", "log", "--no-merges", "--format=%at %h %s"]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        date, commit, subject = line.split(" ", 2)
        if int(date) >= since.timestamp() and len(subject) > LONGEST:
            yield f"{commit} {subject}: {len(subject)} characters; a commit's subject has at most {LONGEST}"


if __name__ == "__main__":
    lines = list(too_long())
    print("\n".join(lines), file=sys.stderr, end="\n" * bool(lines))
    sys.exit(bool(lines))
