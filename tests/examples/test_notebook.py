"""The notebook, executed in an empty folder: its commands print what its text says they do."""

import os
import re
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # starts four processes six times
NOTEBOOK = Path("examples/first_steps.ipynb")


def execute(folder):
    """Return what the notebook's cells print, and the number of its pictures."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "is kept without outputs"
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output.get("text", "") for output in outputs), pictures


def test_the_notebook_trains_and_predicts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.delenv("MPLBACKEND", raising=False)
    printed, pictures = execute(tmp_path)
    ended = re.findall(r"(\w+): rank 0 took 240 steps in ([\d.]+) s, accuracy ([\d.]+)", printed)
    assert [name for name, *_ in ended] == 2 * ["AllReduce", "SGP", "ADPSGD"], printed
    assert all(float(accuracy) > 0.85 for *_, accuracy in ended)
    seconds = {name: float(duration) for name, duration, _ in ended[3:]}  # beside a slow rank
    assert min(seconds["AllReduce"], seconds["SGP"]) > 240 * 0.05  # both wait for it
    assert "64 ranks on 64 machines" in printed
    assert pictures == 1
