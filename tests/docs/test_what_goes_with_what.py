"""The tables of what goes with what, as the code has them."""

from what_goes_with_what import algorithms, compressors, schedules

from tests.docs.snippets import ROOT


def test_the_page_has_what_the_code_says():
    page = (ROOT / "docs/reference/what_goes_with_what.md").read_text()
    for make in (algorithms, schedules, compressors):
        assert make() in page, "print them: python docs/extensions/what_goes_with_what.py"
