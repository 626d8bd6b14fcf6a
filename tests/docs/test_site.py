"""Faults in a page that must break the build of the site."""

import re
import shutil
import subprocess
import sys

import checked_names
import public_names
import pytest
import rendered_pages
import tables  # noqa: F401  what pages call

from pyparallel.gossip import DiLoCo
from pyparallel.pipeline import PipelineTrainer, TiedHead
from pyparallel.planning.pipelines import Timeline
from tests.docs.snippets import FENCE, PAGES, ROOT, blocks_of
from tests.test_floors import FLOORS

# More of names, without a build: WRONG.
FAULTS = {
    "a name that does not exist": (
        "`pyparallel.gossip.Sgp`",
        "pyparallel.gossip.Sgp does not exist",
    ),
    "a role to a name that does not exist": (
        "{py:class}`pyparallel.gossip.DPSGDD`",
        "pyparallel.gossip.DPSGDD",
    ),
    "a link to no page": ("[](no_such_page.md)", "no_such_page.md"),
    "a picture that is not there": ("![x](no_such_picture.png)", "no_such_picture.png"),
}
WRONG = {
    "SGPP(topology)": "SGPP does not exist",
    "GossipDataParalel": "GossipDataParalel does not exist",
    "DPSGDD": "DPSGDD does not exist",
    "topology.Rng(4)": "topology.Rng does not exist",
    "PipelineTrainer.flsh()": "PipelineTrainer.flsh does not exist",
    "PipelineTrainer.call": "PipelineTrainer.call does not exist",
    "SGP(t, overlapp=1)": "SGP() has no argument overlapp",
    "ErrorFeedback(TopK(0.01, densty=1))": "TopK() has no argument densty",
    "mixing_curv(topology)": "mixing_curv() does not exist",
    "model.consensus_distanc()": "model.consensus_distanc() does not exist",
    "nn.Linearr(2, 3)": "nn.Linearr does not exist",
    "nn.Linear(2, 3, bia=True)": "nn.Linear() has no argument bia",
    "dist.x": "dist.x does not exist",
    "torch.nn.Linearr": "torch.nn.Linearr does not exist",
    "python -m pyparallel nosuch": "python -m pyparallel nosuch does not exist",
    "python -m benchmarks.nosuch": "benchmarks.nosuch does not exist",
    "benchmarks/results/nosuch.csv": "benchmarks/results/nosuch.csv does not exist",
    "examples/nosuch.py": "examples/nosuch.py does not exist",
    "tests/nosuch": "tests/nosuch does not exist",
}
RIGHT = [
    "SGP(topology, overlap=1)",
    "PipelineTrainer(..., compress_activations=...)",
    "GossipDataParallel.push_sum_weight",
    "Timeline.bubble_between",
    "Kind.BACKWARD_INPUT",
    "nn.Sequential(*layers)",
    "Own(3).own_method()",
    "model.own_method()",
    "model.consensus_distance()",
    "compress_fsdp(model, gradients=c)",
    "NCCL_DEBUG=INFO",
    "python -m pyparallel plan --out x",
    "benchmarks/results/",
    "P = the sum of M Q",
]
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_exist_is_found(text):
    assert checked_names.fault(text, set()) == WRONG[text]


@pytest.mark.parametrize("text", RIGHT)
def test_what_exists_is_not_refused(text):
    own = checked_names.defined_in("class Own:\n    def own_method(self): ...")
    assert checked_names.fault(text, own) is None


def test_fields_with_functions_as_defaults_are_not_in_the_reference():
    def is_left_out(cls, name):
        return public_names._skip_members(None, "class", name, getattr(cls, name), False, None)

    assert is_left_out(DiLoCo, "outer_optimizer")
    for cls, name in [(PipelineTrainer, "step"), (TiedHead, "norm"), (Timeline, "makespan")]:
        assert is_left_out(cls, name) is None


def test_what_the_readme_names_exists():
    readme = ROOT / "README.md"
    python = [block.text for block in blocks_of(readme) if block.language == "python"]
    defined = set().union(*map(checked_names.defined_in, python))
    named = INLINE.findall(FENCE.sub("", readme.read_text()))
    assert len(named) > 10
    assert [fault for text in named if (fault := checked_names.fault(text, defined))] == []


def find_cells(text):
    """Return the cells of a page's tables as a reader sees them, without the targets of links."""
    lines = [line for line in FENCE.sub("", text).splitlines() if line.startswith("|")]
    cells = [cell for line in lines for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).strip() for cell in cells]


def test_cells_of_tables_are_short(monkeypatch, subtests):
    for function in ("picture", "tables", "reference"):  # these are not written in a page
        monkeypatch.setitem(rendered_pages.ENVIRONMENT.globals, function, lambda *_: "")
    for page in PAGES:
        with subtests.test(page=page.relative_to(ROOT).as_posix()):
            text = page.read_text()
            cells = find_cells(text if page.name == "README.md" else rendered_pages.render(text))
            assert [cell for cell in cells if len(cell) >= 120] == []


def test_cells_are_found():
    text = "| a | [b](c.md) `d` |\n|---|---|\n| e \\| f | g |\n\n```text\n| h |\n```\n"
    assert find_cells(text) == ["a", "b `d`", "---", "---", r"e \| f", "g"]


def test_the_picture_of_the_architecture_has_the_floors():
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    titles = re.findall(r'<text class="t"[^>]* y="([\d.]+)"[^>]*>(\w+)</text>', picture)
    height = {name: float(y) for y, name in titles}
    undrawn = {"kernels", "pyparallel", "__main__"}
    floors = [floor for floor in FLOORS if not floor <= undrawn]
    assert height.keys() == set().union(*floors)
    heights = [{height[name] for name in floor} for floor in floors]
    assert all(len(each) == 1 for each in heights)  # what is on one floor is drawn side by side
    assert heights == sorted(heights, key=max, reverse=True)  # y grows downward


@pytest.fixture
def site(tmp_path):
    """Return a copy of the sources, beside which the package and the rows are those of here."""
    for name in ("pyparallel", "kernels", "benchmarks", "README.md", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build"))
    return tmp_path / "docs"


def build(site):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    return subprocess.run(
        [*command, str(site), str(site / "_build" / "html")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=site.parent,
    )


@pytest.mark.slow  # two builds of the site
def test_faults_in_a_page_break_the_build(site, subtests):
    page = site / "installing.md"
    page.write_text(page.read_text() + "\n\n".join(text for text, _ in FAULTS.values()) + "\n")
    result = build(site)
    assert result.returncode != 0
    for name, (_, message) in FAULTS.items():
        with subtests.test(fault=name):
            assert message in result.stderr
    page.write_text('{{ value("gossip-accuracy", "score", algorithm="no-such-one") }}\n')
    result = build(site)
    assert result.returncode != 0
    assert "installing: gossip-accuracy.csv has no row" in result.stderr
    assert "no-such-one" in result.stderr
