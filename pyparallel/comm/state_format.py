"""The format number that every saved state carries."""

from collections.abc import Mapping
from typing import Any

FORMAT_KEY = "format"
FORMAT = 1  # states that were saved before there was a number load as this one


def find_format_error(state: Mapping[str, Any]) -> str | None:
    """Return why a saved state cannot be loaded by this version of pyparallel, or None."""
    saved = state.get(FORMAT_KEY, FORMAT)
    if saved in range(1, FORMAT + 1):
        return None
    return (
        f"the state's format must be at most {FORMAT}, got {saved!r}: a newer pyparallel has saved "
        "it; upgrade pyparallel to load it"
    )


def check_format(state: Mapping[str, Any]) -> None:
    """Check that this version of pyparallel can load a saved state.

    Raises:
        ValueError: a newer version has saved it.
    """
    if (error := find_format_error(state)) is not None:
        raise ValueError(error)
