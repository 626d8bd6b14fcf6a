"""Tables of TOML and JSON files, whose mistakes are errors that name the line."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...training.arguments import is_integer, is_number


@dataclass(frozen=True)
class Table:
    """A table of a file; ``count`` is the number of tables of the same name before it."""

    path: Path
    text: str
    values: Mapping[str, Any]
    name: str = ""
    count: int = 0

    @classmethod
    def read(cls, path: Path, parse: Callable[[str], Any]) -> "Table":
        """Read a file; a ValueError unless it can be read and holds a table."""
        try:
            text = path.read_text()
            values = parse(text)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        if not isinstance(values, Mapping):
            raise ValueError(f"{path} must hold a table, got {type(values).__name__}")
        return cls(path, text, values)

    def tables(self, name: str) -> "list[Table]":
        """Return the tables of a name, one or several."""
        found = self.values.get(name, [])
        found = found if isinstance(found, list) else [found]
        if not all(isinstance(each, Mapping) for each in found):
            self.fail(f"{name} must be a table", name)
        return [Table(self.path, self.text, each, name, i) for i, each in enumerate(found)]

    def check_names(self, known: Iterable[str]) -> None:
        """Raise a ValueError for a key that is not known."""
        for key in self.values:
            if key not in (names := list(known)):
                self.fail(f"{key} must be one of {', '.join(names)}", key)

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """Return a finite number, positive or at least 0; the default if there is none."""
        value = self.values.get(key, default)
        if value is None:
            self.fail(f"{key} must be given")
        is_valid = is_number(value) and 0 <= value < math.inf and (value or not positive)
        rule = "a number greater than 0" if positive else "a number, at least 0"
        return float(value) if is_valid else self.fail(f"{key} must be {rule}, got {value!r}", key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; the default if there is none."""
        value = self.values.get(key, default)
        rule = f"{key} must be a positive integer, got {value!r}"
        return value if is_integer(value) else self.fail(rule, key)

    def fail(self, problem: str, key: str = "") -> NoReturn:
        """Raise a ValueError with the line of a key, or of the table."""
        place = f", line {line}" if (line := self._find_line(key)) else ""
        raise ValueError(f"{self.path}{place}: {problem}")

    def _find_line(self, key: str) -> int:
        current, seen, of_table = "", 0, 0
        begin = re.compile(rf"\s*\{{?\s*[\"']?{re.escape(key)}[\"']?\s*[=:]")
        for number, line in enumerate(self.text.splitlines(), 1):
            if header := re.match(r"\s*(\[+)([\w-]+)\]+", line):
                current = header[2]
                seen += current == self.name and header[1] == "[["
            if current == self.name and seen in (0, self.count + 1):
                of_table = of_table or number * bool(self.name)
                if key and begin.match(line):
                    return number
        return of_table
