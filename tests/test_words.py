"""The field's words only: terms that PyTorch, the papers and the peers do not use stay out."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["pyparallel", "kernels", "csrc", "tests", "benchmarks", "examples", "docs"]
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".md"}
EXEMPT = ["tests/test_words.py"]
# Results are records of runs.
EXEMPT_FOLDERS = ["benchmarks/results"]

# Each pattern, and the field's term for it. Words that the field uses too, such as state, leader,
# step or chain, must not be here.
COINED = {
    r"parcels?": "message",
    r"farewells?|last words": "abort message",
    r"post office|Mail": "StageP2P",
    r"whoever": "the rank that ...",
    r"anew": "again",
    r"owed?|owes|owing": "pending, residual",
    r"strangeness": "not_a_compressor",
    r"foresights?|foreseen|foresees?": "prediction, prefetched",
    r"hand(s|ed|ing)? on": "send to the next stage",
    r"under way": "in flight, pending",
    r"on paper": "simulated",
    r"untold": "residual",
    r"unhurried": "non-blocking",
    r"askers?": "active rank",
    r"say(s|ing)? so|said so": "report",
    r"told of|tells? of": "report",
    r"for whose sake": "because of",
    r"Gatherers?": "Compressor.mean_",
    r"WholeNumbers": "Quantizer",
    r"BlockCoders?": "BlockwiseCompressor",
    r"HeadAtWork": "HeadRuntime",
    r"rehears(e|al|es|ed)": "profile",
    r"Displaces": "PredictsStep",
    r"the pipe": "the pipeline",
    r"the stage behind": "the next stage",
    r"is late|are late|who is done": "is slow, has finished",
}
PATTERN = re.compile(rf"(?<!\w)({'|'.join(COINED)})(?!\w)")
ANY_CASE = re.compile(PATTERN.pattern, re.IGNORECASE)


def find_coined(text: str) -> list[str]:
    """Coined words of a text; those written in capitals in COINED are names of classes."""
    found = []
    for match in ANY_CASE.finditer(text):
        is_name = any(key[0].isupper() and re.fullmatch(key, match[0], re.I) for key in NAMES)
        if not is_name or PATTERN.fullmatch(match[0]):
            found.append(match[0])
    return found


NAMES = [part for key in COINED for part in key.split("|") if part[0].isupper()]


def find_files(root: Path) -> list[Path]:
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*")]
    files += root.glob("*.md")
    return [
        path
        for path in files
        if path.suffix in SUFFIXES
        and path.relative_to(root).as_posix() not in EXEMPT
        and not any(path.is_relative_to(root / folder) for folder in EXEMPT_FOLDERS)
    ]


def test_no_coined_word_is_used():
    found = {
        path.relative_to(ROOT).as_posix(): sorted(set(words))
        for path in find_files(ROOT)
        if (words := find_coined(path.read_text()))
    }
    assert found == {}


def test_a_coined_word_is_seen():
    for text, words in [
        ("a Parcel travels", ["Parcel"]),
        ("what is owed, drawn anew", ["owed", "anew"]),
        ("stages hand on values", ["hand on"]),
        ("the pipeline, the state, the leader, a step, by mail", []),
        ("Mail", ["Mail"]),
        ("a stage says so", ["says so"]),
    ]:
        assert find_coined(text) == words, text


def test_files_of_every_kind_are_read():
    names = {path.relative_to(ROOT).as_posix() for path in find_files(ROOT)}
    assert {"README.md", "csrc/mix.h", "pyparallel/ops/mix.py", "tests/test_floors.py"} <= names
    assert not names & set(EXEMPT)
