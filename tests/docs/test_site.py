"""Faults in a page that must break the build of the site."""

import shutil
import subprocess
import sys

import pytest

from tests.docs.snippets import ROOT

FAULTS = {
    "a name that does not exist": (
        "`pyparallel.gossip.Sgp`",
        "pyparallel.gossip.Sgp does not exist",
    ),
    "a role to a name that does not exist": (
        "{py:class}`pyparallel.gossip.DPSGDD`",
        "pyparallel.gossip.DPSGDD",
    ),
    "a name of torch that does not exist": (
        "`torch.nn.Linearr`",
        "torch.nn.Linearr does not exist",
    ),
    "a link to no page": ("[](no_such_page.md)", "no_such_page.md"),
    "a picture that is not there": ("![x](no_such_picture.png)", "no_such_picture.png"),
}


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
