"""Inventories for intersphinx, from ``inventories/*.txt``: a build needs no network."""

import importlib
import zlib
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]


def lines(project: str) -> list[list[str]]:
    """Return the name, the role and the page of each object of a project."""
    text = (DOCS / "inventories" / f"{project}.txt").read_text()
    return [line.split() for line in text.splitlines()]


def names(project: str) -> list[str]:
    """Return the names of a project's objects."""
    return [name for name, _, _ in lines(project)]


def build(project: str) -> str:
    """Write the inventory of a project below ``_build`` and return its path.

    A line of ``inventories/<project>.txt`` is ``name role page``, role as in ``py:class`` without
    ``py:``. Each name must be importable.

    Raises:
        ValueError: a name does not exist in the installed package.
    """
    entries = []
    for name, role, page in lines(project):
        if not exists(name):
            raise ValueError(f"inventories/{project}.txt: {name} must exist in {project}")
        entries.append(f"{name} py:{role} 1 {page} -\n")
    path = DOCS / "_build" / f"{project}.inv"
    path.parent.mkdir(exist_ok=True)
    header = f"# Sphinx inventory version 2\n# Project: {project}\n# Version:\n"
    header += "# The remainder of this file is compressed using zlib.\n"
    path.write_bytes(header.encode() + zlib.compress("".join(entries).encode()))
    return str(path)


def exists(name: str) -> bool:
    """Whether a dotted name can be imported, as a module or from one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        try:
            for part in parts[length:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    builtins = importlib.import_module("builtins")
    return hasattr(builtins, name)
