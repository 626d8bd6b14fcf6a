"""Pictures of files that have only a part of the rows."""

import importlib

import pytest

from benchmarks.harness.pictures import drawn, main
from benchmarks.harness.rows import RESULTS, read_rows, write_rows
from benchmarks.harness.tables import where
from tests.cases import slow_unless

AREAS = {
    "gossip": {"steps": ["links-sleeping", "links-computing"], "stragglers": ["stragglers"],
               "cost": [], "leaders": []},
    "pipeline": {"throughput": ["throughput"], "bubbles": ["bubbles"], "prediction": []},
    "interlocking": {"windows": ["windows"], "straggler": ["straggler"],
                     "cotangents": ["gradients-together"], "computing": []},
    "compression": {"links": ["links"], "cost": ["encoding"], "power_sgd": ["power-sgd"],
                    "casts": []},
}  # fmt: skip


@pytest.mark.parametrize("area", slow_unless(["compression"], AREAS))
def test_a_file_of_a_single_part_is_drawn(area, tmp_path):
    pictures = importlib.import_module(f"benchmarks.{area}.picture").PICTURES
    rows = read_rows(RESULTS / f"{area}-amd-epyc-2-threads.csv")
    assert {row["part"] for row in rows} == set(AREAS[area])
    for part, names in AREAS[area].items():
        assert drawn(pictures, where(rows, part=part), tmp_path / part) == names, part
    assert drawn(pictures, [], tmp_path) == []


def test_the_program_draws_beside_the_file(tmp_path, monkeypatch, capsys):
    pictures = importlib.import_module("benchmarks.gossip.picture").PICTURES
    rows = where(read_rows(RESULTS / "gossip-amd-epyc-2-threads.csv"), part="stragglers")
    write_rows(rows, tmp_path / "rows.csv", list(rows[0]))
    monkeypatch.setattr("sys.argv", ["picture", str(tmp_path / "rows.csv")])
    main(pictures)
    picture = tmp_path / "rows" / "stragglers.png"
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
