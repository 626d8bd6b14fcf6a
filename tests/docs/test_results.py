"""The pages of results: their numbers, tables and pictures are those of the rows."""

import csv
import functools
from pathlib import Path

import gains
import pytest
import readme
import rendered_pages
import rows
import tables
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "results").glob("*.md")}
GOSSIP, PIPELINE = "gossip-amd-epyc-2-threads", "pipeline-amd-epyc-2-threads"
WINDOWS, LINKS = "interlocking-amd-epyc-2-threads", "compression-amd-epyc-2-threads"
SOAK = "soak-intel-r-xeon-r-processor-2-threads"
FAULTS = "faults-amd-epyc-2-threads"
UPDATES = "gossip-intel-r-xeon-r-processor-2-threads"
CALLS = "calls-intel-r-xeon-r-processor-2-threads"
LINKED = "pipeline-intel-r-xeon-r-processor-2-threads"
MODELS = "language-models-intel-r-xeon-r-processor-2-threads"
PIPEOPTIM = {"part": "throughput", "case": "M = 8", "system": "PipeOptim"}

# Page, file, the rows to change, the column, its new value, and the text that the page must gain.
CHANGES = [
    ("gossip", "gossip-accuracy", {"algorithm": "diloco"}, "score", "0.98123", "98.12%"),
    (
        "gossip",
        GOSSIP,
        {"part": "steps", "method": "SGP, overlap=1"},
        "median_ms",
        "2468.1",
        "2468",
    ),
    ("gossip", GOSSIP, {"part": "stragglers", "method": "SGP"}, "lost_ms", "24.68", "24.7"),
    ("gossip", UPDATES, {"part": "closures", "method": "SGP"}, "median_ms", "2468.1", "2468"),
    ("gossip", UPDATES, {"part": "nonfinite", "case": "skip"}, "ratio", "1.234", "1.234"),
    ("pipelines", "pipeline-accuracy", {"schedule": "xpipe"}, "held_out_loss", "2.71", "2.7100"),
    ("pipelines", PIPELINE, PIPEOPTIM, "of_limit", "0.937", "0.94"),
    ("pipelines", PIPELINE, {"part": "bubbles", "system": "PipeDream"}, "bubble", "0.7", "70.0%"),
    ("pipelines", LINKED, {"part": "link", "system": "PipeOptim"}, "ratio", "0.77", "0.77"),
    ("language_models", MODELS, {"schedule": "PipeOptim"}, "held_out_bits", "7.7", "7.7000"),
    ("interlocking", "interlocking-accuracy", {"schedule": "3"}, "training_loss", "7.7", "7.7000"),
    ("interlocking", WINDOWS, {"case": "M = 4"}, "median_ms", "9", "| 9 "),
    ("subnetworks", "subnets-amd-epyc-2-threads", {"seed": "0"}, "steps", "99999", "33,"),
    ("subnetworks", "subnets-theory", {"ranks": "4"}, "limit_to_solution", "0.4321", "0.4321"),
    ("compression", "compression-accuracy", {"compressor": "dgc"}, "score", "0.9123", "91.23%"),
    ("compression", LINKS, {"system": "dgc"}, "median_ms", "77", "| 77 "),
    ("ops", "amd-epyc-2-threads", {"op": "top_k"}, "median_ms", "777.7", "777.7"),
    ("ops", CALLS, {"op": "mix_"}, "median_us", "777.7", "778"),
    ("long_runs", SOAK, {"case": "ADPSGD"}, "growth_kb", "24.68", "+24.7"),
    ("long_runs", FAULTS, {"fault": "kill -9"}, "slowest_s", "24.6", "24.6"),
    ("index", LINKS, {"system": "topk-ef"}, "median_ms", "77", "**77 ms"),
]


@functools.cache
def rendered(page):
    """Return a page as its rows have it, without pictures."""
    return rendered_pages.render(PAGES[page])


@pytest.fixture(autouse=True)
def pictures(tmp_path, monkeypatch):
    """Return the folder where pictures are drawn."""
    monkeypatch.setattr(tables, "PICTURES", tmp_path / "pictures")
    return tmp_path / "pictures"


@pytest.fixture
def change(monkeypatch):
    """Return a function that replaces some rows of a file by those that another one returns."""

    def replace(name, where, change_row):
        path, read = rows.RESULTS / f"{name}.csv", rows._read
        found = read(path)
        chosen = [row for row in found if all(row[key] == where[key] for key in where)]
        assert chosen, where
        pairs = [change_row(row) if row in chosen else [row] for row in found]
        changed = tuple(row for each in pairs for row in each)
        monkeypatch.setattr(rows, "_read", lambda other: changed if other == path else read(other))

    # Pages are rendered without their pictures, which take long to draw.
    monkeypatch.setitem(rendered_pages.ENVIRONMENT.globals, "picture", lambda *_: "")
    return replace


@pytest.mark.slow  # a page takes seconds to render
@pytest.mark.parametrize(("page", "name", "where", "column", "new", "text"), CHANGES)
def test_a_row_that_changes_changes_its_page(change, page, name, where, column, new, text):
    before = rendered(page)
    change(name, where, lambda row: [{**row, column: new}])
    after = rendered_pages.render(PAGES[page])
    assert after.count(text) > before.count(text)


def test_a_row_that_changes_changes_its_picture(change, pictures):
    def draw():
        image = tables.picture("gossip", "stragglers", GOSSIP)
        return image, (pictures / "gossip-stragglers.png").read_bytes()

    image, before = draw()
    assert image == (
        "![How much longer is a step where ranks are slow?](/_build/pictures/gossip-stragglers.png)"
    )
    assert draw() == (image, before)
    change(GOSSIP, {"method": "ADPSGD"}, lambda row: [{**row, "lost_ms": "50"}])
    assert draw()[1] != before


@pytest.mark.parametrize(
    ("change_row", "message"),
    [
        (lambda row: [], r"pipeline-amd-epyc-2-threads\.csv has no row with .*'M = 8'.*PipeOptim"),
        (lambda row: [row, row], r"pipeline-.*\.csv must have one row with .*got 2"),
        (lambda row: [{**row, "of_limit": ""}], "has no of_limit in the row .*PipeOptim"),
        (lambda row: [{**row, "of_limit": "0.5"}], "no longer support: `PipeOptim` is faster"),
    ],
)
def test_a_page_raises_where_it_lacks_one_row(change, change_row, message):
    change(PIPELINE, PIPEOPTIM, change_row)
    with pytest.raises(LookupError, match=message):
        rendered_pages.render(PAGES["pipelines"])


@pytest.mark.parametrize(
    ("name", "where", "changed", "message"),
    [
        ("gossip-accuracy", {"data": "digits", "algorithm": "sgp"}, {"score": "0.9"}, "level"),
        (
            "pipeline-accuracy",
            {"task": "digits-sgd", "schedule": "naive", "rate": "0.1"},
            {"held_out_accuracy": "0.97"},
            "At 0.1 GPipe trains",
        ),
        (
            "interlocking-accuracy",
            {"task": "digits", "schedule": "3 deep"},
            {"held_out_accuracy": "0.97"},
            "windows 1 to 3 are at or above end to end",
        ),
        ("subnets-amd-epyc-2-threads", {"task": "digits"}, {"at_seconds": "9"}, "on digits first"),
        (
            "compression-accuracy",
            {"task": "text", "compressor": "int8"},
            {"score": "2.6"},
            "has a setting within 2 %",
        ),
    ],
)
def test_a_verdict_on_a_paper_fails_without_the_rows(change, name, where, changed, message):
    page = (ROOT / "docs" / "explanation" / "papers.md").read_text()
    assert message in rendered_pages.render(page)

    def changed_row(row):
        return [
            row | {key: " ".join([new] * len(row[key].split())) for key, new in changed.items()}
        ]

    change(name, where, changed_row)
    with pytest.raises(LookupError, match=f"no longer support: .*{message}"):
        rendered_pages.render(page)


def test_a_picture_without_rows_raises():
    with pytest.raises(LookupError, match=r"gossip-accuracy\.csv has no rows for .* stragglers"):
        tables.picture("gossip", "stragglers", "gossip-accuracy")


@pytest.mark.slow  # draws every picture
@pytest.mark.docs
def test_all_rows_and_all_pictures_are_shown(pictures):
    text = "".join(map(rendered_pages.render, PAGES.values()))
    assert [path.name for path in rows.RESULTS.iterdir() if path.name not in text] == []
    areas = ("gossip", "pipeline", "interlocking", "subnets", "compression", "ops")
    modules = {area: tables.importlib.import_module(f"benchmarks.{area}.picture") for area in areas}
    expected = {f"{area}-{each}.png" for area in areas for each in modules[area].PICTURES}
    assert {path.name for path in pictures.iterdir()} == expected


def test_the_gains_in_the_readme_are_those_of_the_rows(change):
    text = (ROOT / "README.md").read_text()
    assert readme.with_gains(text) == text, "python docs/extensions/readme.py writes it again"
    change(PIPELINE, PIPEOPTIM, lambda row: [{**row, "of_limit": "0.937"}])
    assert "**0.94**" in readme.with_gains(text)


def test_a_readme_without_the_marks_is_refused():
    with pytest.raises(ValueError, match=r"README\.md must have one line <!-- gains -->"):
        readme.with_gains("# pyparallel\n")


def test_the_picture_of_the_gains_is_that_of_the_rows(change, tmp_path):
    def drawn_from(path):
        with Image.open(path) as image:
            return image.text["Rows"]

    assert drawn_from(gains.PATH) == gains.digest(), (
        "python docs/extensions/readme.py draws it again"
    )
    change(PIPELINE, PIPEOPTIM, lambda row: [{**row, "of_limit": "0.937"}])
    assert drawn_from(gains.PATH) != gains.digest()
    gains.draw(tmp_path / "gains.png")
    assert drawn_from(tmp_path / "gains.png") == gains.digest()


def test_rows_of_uncommitted_changes_are_said_to_be(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)

    def measured(*commits):
        found = [{"torch": "2", "commit": commit} for commit in commits]
        with (tmp_path / "some.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["torch", "commit"])
            writer.writeheader()
            writer.writerows(found)
        rows._read.cache_clear()
        return tables.measured("some", "make x").partition(": ")[0]

    assert measured("a", "a") == "*Measured on the CPU, torch 2, commit a"
    assert measured("a-dirty").endswith("commit a, with uncommitted changes")
    assert measured("a", "b").endswith("2 commits (in the rows)")
    text = "3 commits (in the rows), 2 of them with uncommitted changes"
    assert measured("a", "b-dirty", "c-dirty").endswith(text)
