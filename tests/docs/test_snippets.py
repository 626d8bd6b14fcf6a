"""What the README and the pages show must run, and print what they show."""

import re
from pathlib import Path

import pytest

from tests.docs.snippets import (
    NOT_RUN,
    PAGES,
    ROOT,
    assert_learned,
    assert_prints,
    blocks_of,
    num_ranks_of,
    run_command,
    run_page,
)

WITH_PYTHON = [page for page in PAGES if any(b.language == "python" for b in blocks_of(page))]
WITH_COMMANDS = [page for page in PAGES if any(b.language == "console" for b in blocks_of(page))]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def test_every_block_has_a_language():
    for page in PAGES:
        for block in blocks_of(page):
            assert block.language, f"{block.place} must be python, console or text"


def test_the_python_of_every_page_runs_and_learns(ranks, subtests, tmp_path):
    assert len(WITH_PYTHON) >= 1
    for page in WITH_PYTHON:
        with subtests.test(page=name_of(page)):
            blocks = blocks_of(page)
            folder = tmp_path / name_of(page).replace("/", "-")
            folder.mkdir()
            numbers = {num_ranks_of(each, blocks) for each in blocks if each.language == "python"}
            printed = [
                printed_by_rank
                for number in sorted(numbers, reverse=True)  # scripts leave files for the others
                for printed_by_rank in ranks.run(number, run_page, blocks, folder)
            ]
            of_blocks = ["".join(of_block) for of_block in zip(*printed, strict=True)]
            assert_learned("".join(of_blocks), name_of(page))
            check_shown(blocks, of_blocks)


def check_shown(blocks, printed):
    """Compare each text block with what the Python before it has printed since the last one."""
    since = ""
    for block, output in zip(blocks, printed, strict=True):
        since += output
        if block.language == "text" and since:
            assert_prints(block.text, since, block.place)
            since = ""


@pytest.mark.slow  # the same scripts and the commands, started as a user does
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_the_commands_of_a_page_run(page, tmp_path):
    printed = ""
    for block in blocks_of(page):
        if block.language == "python":
            printed = ""  # what it prints is compared by the fast test
        if block.script:
            (tmp_path / block.script).write_text(block.text)
        elif block.language == "console":
            for command in block.commands:
                if not command.startswith(NOT_RUN):
                    printed += run_command(command, tmp_path)
        elif block.language == "text" and printed:
            assert_prints(block.text, printed, block.place)
            printed = ""


def test_commands_that_are_not_run_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
            assert target in targets, f"{name_of(page)}: make {target}"
        for file in re.findall(r"\bexamples/\w+\.py", text):
            assert (ROOT / file).exists(), f"{name_of(page)}: {file}"


def test_the_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_the_page_of_tests_names_tests_that_exist():
    folder = Path("tests")
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (folder / "README.md").read_text())
    assert len(named) > 40
    for path, name in named:
        assert f"def {name}(" in (folder / path).read_text() if name else (folder / path).exists()
