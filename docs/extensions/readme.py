"""``python docs/extensions/readme.py``: write the gains into README.md, draw their picture.

They stand between ``<!-- gains -->`` and ``<!-- end of gains -->``.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import gains  # noqa: E402  benchmarks/ is found now
import rendered_pages  # noqa: E402  likewise

BEGIN, END = "<!-- gains -->", "<!-- end of gains -->"


def with_gains(text: str) -> str:
    """Return the text of README.md with the gains as the rows have them.

    Raises:
        ValueError: the text lacks one of the two marks.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must have one line {BEGIN} and one line {END}")
    before, after = text.split(BEGIN, maxsplit=1)[0], text.split(END)[1]
    measured = rendered_pages.render((ROOT / "docs" / "gains.md").read_text()).strip()
    return f"{before}{BEGIN}\n{measured}\n{END}{after}"


def main() -> None:
    """Rewrite README.md and docs/images/gains.png."""
    path = ROOT / "README.md"
    path.write_text(with_gains(path.read_text()))
    gains.draw()


if __name__ == "__main__":
    main()
