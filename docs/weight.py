"""Compare the lines of platform/ with their bound: the last row of the table in docs/decisions/0050-weight.md.

`make lint` runs it. It ends with status 1 where there are more lines than the bound allows.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/decisions/0050-weight.md"


def bound(page: str) -> int:
    """Return the number of lines in the last row of the page's table."""
    return int(re.findall(r"^\| [\d-]{10} \| ([\d,]+) \|", page, re.M)[-1].replace(",", ""))


def lines(folder: Path) -> int:
    """Return the number of lines of all Python files below a folder."""
    return sum(path.read_text().count("\n") for path in folder.rglob("*.py"))


def main() -> None:
    most, found = bound(PAGE.read_text()), lines(ROOT / "platform")
    print(f"platform/ has {found:,} lines; at most {most:,} are allowed by {PAGE.relative_to(ROOT)}")
    if found > most:
        sys.exit(f"error: {found - most:,} lines too many: delete some, or add a row with the reason")


if __name__ == "__main__":
    main()
