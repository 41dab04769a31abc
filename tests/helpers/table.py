"""A table of numbers that tests fill and the end of the session prints."""


class Table:
    """Numbers by method and column, printed when all tests are through."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, float]] = {}

    def add(self, row: str, column: str, value: float) -> None:
        self.cells.setdefault(row, {})[column] = value

    def lines(self) -> list[str]:
        columns = sorted({c for cells in self.cells.values() for c in cells})
        width = max(map(len, self.cells), default=0)
        head = " " * width + "".join(f"  {c}" for c in columns)
        rows = [
            f"{row:<{width}}"
            + "".join(f"  {cells[c]:>{len(c)}.1e}" if c in cells else " " * (len(c) + 2) for c in columns)
            for row, cells in sorted(self.cells.items())
        ]
        return [head, *rows]
