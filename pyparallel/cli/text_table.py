"""Tables of text, for the command line."""

from collections.abc import Iterable


def aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A line for each row: its first column flush left, the others flush right."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table
    ]
