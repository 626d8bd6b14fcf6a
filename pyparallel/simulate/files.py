"""Files that a simulation reads, whose mistakes are errors that name the line."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..training.arguments import is_integer, is_number


@dataclass(frozen=True)
class Source:
    """A file's text, to find the line of what is wrong in it."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> "Source":
        """Read a file; a ValueError if it cannot be read."""
        try:
            return cls(path, path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be a file that can be read: {error}") from error

    def fail(self, problem: str, table: str = "", key: str = "", count: int = 0) -> NoReturn:
        """Raise a ValueError with the line of a key, or of a table; ``count``: of which one."""
        place = ""
        if line := self._find_line(table, key, count):
            place = f", line {line}"
        raise ValueError(f"{self.path}{place}: {problem}")

    def _find_line(self, table: str, key: str, count: int) -> int:
        current, seen, of_table = "", 0, 0
        begin = re.compile(rf"\s*\{{?\s*[\"']?{re.escape(key)}[\"']?\s*[=:]")
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*(\[+)([\w-]+)\]+", line):
                current = header[2]
                seen += current == table and header[1] == "[["
            is_here = current == table and seen in (0, count + 1)
            if is_here and table and not of_table:
                of_table = number
            if is_here and key and begin.match(line):
                return number
        return of_table


@dataclass(frozen=True)
class Table:
    """A table of a file, with checks of its keys."""

    source: Source
    values: Mapping[str, Any]
    name: str = ""
    count: int = 0  # of the tables of this name before it

    def check_names(self, known: Iterable[str]) -> None:
        """Raise a ValueError for a key that is not known."""
        names = list(known)
        for key in self.values:
            if key not in names:
                self.fail(f"{key} must be one of {', '.join(names)}", key)

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """Return a finite number, positive or at least 0; the default if there is none."""
        value = self.values.get(key, default)
        if value is None:
            self.fail(f"{key} must be given", "")
        rule = "greater than 0" if positive else "at least 0"
        if (
            not is_number(value)
            or not math.isfinite(value)
            or value < 0
            or (positive and not value)
        ):
            self.fail(f"{key} must be a number {rule}, got {value!r}", key)
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; the default if there is none."""
        value = self.values.get(key, default)
        if not is_integer(value):
            self.fail(f"{key} must be a positive integer, got {value!r}", key)
        return value

    def fail(self, problem: str, key: str) -> NoReturn:
        """Raise a ValueError with the line of a key."""
        self.source.fail(problem, self.name, key, self.count)
