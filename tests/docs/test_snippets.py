"""What the README and the pages show must run, and print what they show."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import nightly
from tests.docs import snippets
from tests.docs.snippets import (
    NOT_RUN,
    PAGES,
    ROOT,
    assert_learned,
    assert_prints,
    blocks_of,
    check_shown,
    is_launched,
    num_ranks_of,
    run_command,
    run_page,
)

README = ROOT / "README.md"
WITH_PYTHON = [
    page
    for page in PAGES
    if any(
        each.language == "python" and not is_launched(each, blocks_of(page))
        for each in blocks_of(page)
    )
]

# The scripts of pages run on as many ranks in the test of their Python; torchrun starts these too.
STARTED = ["README.md", "docs/tutorials/gossip.md", "docs/how_to/hugging_face.md"]
IN_TESTS = (*NOT_RUN, "torchrun --standalone")


def has_commands_to_run(page):
    commands = [each for block in blocks_of(page) if block.language == "console"
                for each in block.commands]  # fmt: skip
    return name_of(page) in STARTED or not all(each.startswith(IN_TESTS) for each in commands)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def test_pages_without_python_show_only_what_commands_print():
    without = [page for page in PAGES if page not in WITH_PYTHON]
    assert without
    for page in without:
        blocks = blocks_of(page)
        check_shown(blocks, [""] * len(blocks))


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes a page and returns its blocks."""
    monkeypatch.setattr(snippets, "ROOT", tmp_path)

    def write(text):
        page = tmp_path / "page.md"
        page.write_text(text)
        return blocks_of(page)

    return write


@pytest.mark.parametrize(
    "fence",
    [
        "```",
        "```py",
        "```python3",
        "```bash",
        "~~~",
        "~~~sh",
        "```{code-block} python",
        ":::{code}",
    ],
)
def test_blocks_of_another_language_are_refused(written, fence):
    with pytest.raises(ValueError, match=r"page\.md:2 must be python, console or text, got "):
        written(f"\n{fence}\nprint(1)\n{fence[:3]}\n")


@pytest.mark.parametrize(
    "text", ["- ```python\n  1\n  ```\n", "> ```text\n> 1\n> ```\n", "```text\n1\n"]
)
def test_fences_that_are_not_those_of_a_block_are_refused(written, text):
    with pytest.raises(ValueError, match=r"page\.md has ``` that does not fence a block"):
        written(text)


def test_blocks_of_all_fences_are_read(written):
    blocks = written("~~~python\n1\n~~~\n\n  ````text\n  ```\n  ````\n```{toctree}\nx\n```\n")
    assert [(block.language, block.text) for block in blocks] == [
        ("python", "1\n"),
        ("text", "```\n"),
    ]


def test_an_included_file_is_a_script(written, tmp_path):
    (tmp_path / "x.py").write_text("print(1)\n")
    torchrun = "```console\ntorchrun --standalone --nproc-per-node 3 x.py\n```\n"
    blocks = written("```{literalinclude} x.py\n:language: python\n```\n" + torchrun)
    assert (blocks[0].script, blocks[0].text) == ("x.py", "# x.py\nprint(1)\n")
    assert num_ranks_of(blocks[0], blocks) == 3


PYTHON, TEXT = "```python\nx\n```\n", "```text\nloss 0.5\n```\n"


@pytest.mark.parametrize("page", [TEXT, PYTHON + TEXT, PYTHON + TEXT + TEXT])
def test_text_that_nothing_prints_is_refused(written, page):
    blocks = written(page)
    printed = [
        "loss 0.5" if page.count(TEXT) == 2 and not place else "" for place in range(len(blocks))
    ]
    with pytest.raises(AssertionError, match=r"page\.md:\d+ shows what no block prints"):
        check_shown(blocks, printed)


def test_text_after_commands_is_left_to_them(written):
    check_shown(
        written(PYTHON + TEXT + "```console\nmake x\n```\n" + TEXT), ["loss 0.5", "", "", ""]
    )


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("period 6", "period 5"),
        ("1,024 bytes", "1,025 bytes"),
        ("loss 0.50", "loss 0.61"),
        ("a 1", "b 1"),
    ],
)
def test_output_that_differs_is_refused(shown, printed):
    with pytest.raises(AssertionError, match="here shows"):
        assert_prints(shown, printed, "here")


@pytest.mark.parametrize(("shown", "printed"), [("loss 0.50", "loss 0.59"), ("x 0.01", "x 0.02")])
def test_floats_may_differ_a_little(shown, printed):
    assert_prints(shown, printed, "here")


def test_the_python_of_the_readme_runs_and_learns(ranks, subtests, tmp_path):
    run_and_check([README], ranks, subtests, tmp_path)


# What users change in the README's pipeline first, and the last line that it prints.
LAYERS = "torch.nn.ReLU(), torch.nn.Linear(128, 10)]"
CHANGED_PIPELINES = {
    "dropout": (LAYERS, LAYERS.replace("ReLU(),", "ReLU(), torch.nn.Dropout(0.1),"), 0.7),
    "a reused buffer": (
        "inputs = torch.randn(64, 64)",
        "inputs = globals().setdefault('memory', torch.empty(64, 64)).normal_()",
        0.421,
    ),
    "a loader without a seed": (
        "trainer = ",
        "torch.manual_seed(dist.get_rank())\ntrainer = ",
        "target must be of the same batch on all ranks",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED_PIPELINES)
def test_changed_pipelines_of_the_readme_learn_or_are_refused(name, ranks, tmp_path):
    before, after, result = CHANGED_PIPELINES[name]
    blocks = blocks_of(README)
    (at,) = (index for index, each in enumerate(blocks) if each.script == "stages.py")
    assert before in blocks[at].text
    blocks[at] = replace(blocks[at], text=blocks[at].text.replace(before, after, 1))
    outcomes = ranks.observe(2, run_page, blocks, tmp_path)
    if isinstance(result, str):
        assert all(result in outcome.error for outcome in outcomes)
    else:
        printed = "".join("".join(outcome.value) for outcome in outcomes)
        assert float(printed.split()[-1]) < result


@pytest.mark.slow
@pytest.mark.docs
def test_the_python_of_every_page_runs_and_learns(ranks, subtests, tmp_path):
    assert len(WITH_PYTHON) > 15
    run_and_check(WITH_PYTHON, ranks, subtests, tmp_path)


def run_and_check(pages, ranks, subtests, tmp_path):
    for page in pages:
        with subtests.test(page=name_of(page)):
            blocks = blocks_of(page)
            folder = tmp_path / name_of(page).replace("/", "-")
            folder.mkdir()
            for block in blocks:
                if block.script:
                    (folder / block.script).parent.mkdir(exist_ok=True)
                    (folder / block.script).write_text(block.text)
            numbers = {num_ranks_of(each, blocks) for each in blocks if each.language == "python"}
            printed = [
                printed_by_rank
                for number in sorted(numbers, reverse=True)  # scripts leave files for the others
                for printed_by_rank in ranks.run(number, run_page, blocks, folder)
            ]
            of_blocks = ["".join(of_block) for of_block in zip(*printed, strict=True)]
            assert_learned("".join(of_blocks), name_of(page))
            check_shown(blocks, of_blocks)


@pytest.mark.slow  # the same scripts and the commands, started as a user does
@pytest.mark.parametrize(
    "page",
    [
        page if name_of(page).startswith(("README", "docs/tutorials")) else nightly(page)
        for page in filter(has_commands_to_run, PAGES)
    ],
    ids=name_of,
)
def test_the_commands_of_a_page_run(page, tmp_path):
    printed, ran = "", False
    for block in blocks_of(page):
        if block.language == "python":
            printed, ran = "", False  # what it prints is compared by the fast test
        if block.script:
            (tmp_path / block.script).write_text(block.runnable)
        elif block.language == "console":
            for command in block.commands:
                if not command.startswith(NOT_RUN):
                    printed, ran = printed + run_command(command, tmp_path), True
        elif block.language == "text" and ran:
            assert_prints(block.text, printed, block.place)
            printed, ran = "", False


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
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_page_of_tests_names_tests_that_exist():
    folder = Path("tests")
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (folder / "README.md").read_text())
    assert len(named) > 40
    for path, name in named:
        assert f"def {name}(" in (folder / path).read_text() if name else (folder / path).exists()
