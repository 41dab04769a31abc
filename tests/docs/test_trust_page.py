"""tests/findings.md names tests that exist, for each finding of the review."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_finding_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| ([A-CEF]\d+) .*?\| (.*) \|$", (ROOT / "tests" / "findings.md").read_text(), re.MULTILINE)
    counts = {"A": 12, "B": 9, "C": 13, "E": 8, "F": 9}
    assert [name for name, _ in rows] == [f"{kind}{i}" for kind, n in counts.items() for i in range(1, n + 1)]
    for finding, text in rows:
        named = re.findall(r"`(\w+(?:/\w+)*\.py)`((?:: )?[^`]*)", text)
        assert named or text.startswith(("no test", "no mend")), finding
        for file, functions in named:
            source = (ROOT / "tests" / file).read_text()
            for function in re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", functions):
                assert f"def test_{function}(" in source, f"{finding}: {file}: {function}"
