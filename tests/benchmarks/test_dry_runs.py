"""Every program measures each of its parts at small sizes; no time is asserted."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.compression import cost
from benchmarks.compression.systems import SYSTEMS
from benchmarks.gossip import cost as gossip_cost
from benchmarks.gossip import trainers
from benchmarks.harness.pictures import drawn
from benchmarks.harness.rows import read_rows
from benchmarks.interlocking import bench as interlocking
from benchmarks.interlocking.sleeping import end_to_end, every_window
from benchmarks.pipeline import bench as pipeline
from benchmarks.pipeline.systems.ours import OURS
from benchmarks.pipeline.systems.peers import DEEP_PEERS, PEERS
from pyparallel.planning.recommend import CANDIDATES

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "": ["checkouts", "gpu", "soak"],
    "soak": ["members"],
    "harness": ["build"],
    "ops": ["calls", "held_sms", "overlap"],
    "gossip": [
        "bench",
        "bets",
        "compare",
        "outer_steps",
        "overlap_link",
        "rates",
        "scale",
        "sharded",
        "sharded_merge",
        "stationary",
    ],
    "pipeline": ["bench", "compare", "optimizers", "clock", "paper", "replicas", "slow_replica"],
    "interlocking": ["bench", "compare"],
    "compression": ["bench", "compare"],
    "subnets": ["compare", "compare_gradients", "compare_sketches"],
    "language_models": ["bench", "compare", "recipes", "replicas", "start"],
    "sequence": ["slow_link"],
    "tiles": ["in_flight"],
}
NAMES = [".".join(filter(None, [area, each])) for area, of in PROGRAMS.items() for each in of]
HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
        print("helped", name)
"""


@pytest.mark.slow  # a process for each
def test_every_program_has_its_arguments():
    modules = ["benchmarks", *(f"benchmarks.{name}" for name in NAMES)]
    command = [sys.executable, "-W", "ignore", "-c", HELP, *modules]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    helped = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("helped")]
    assert helped == modules, done.stderr


def dry_run(area, path):
    """Return the rows of a dry run, by part."""
    module = import_module(f"benchmarks.{area}.bench")
    command = [sys.executable, "-m", f"benchmarks.{area}.bench", "--dry-run", "--out", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(path)
    assert list(rows[0]) == module.FIELDS
    assert list(dict.fromkeys(row["part"] for row in rows)) == list(module.PARTS)
    pictures = import_module(f"benchmarks.{area}.picture").PICTURES
    names = drawn(pictures, rows, path.parent)
    return {part: [row for row in rows if row["part"] == part] for part in module.PARTS}, names


def names_of(systems):
    return [system.name for system in systems]


def column(rows, name):
    return [row[name] for row in rows]


@pytest.mark.slow
def test_gossip(tmp_path):
    rows, pictures = dry_run("gossip", tmp_path / "rows.csv")
    assert pictures == ["links-sleeping", "links-computing", "stragglers"]
    methods = [*names_of(trainers.METHODS), trainers.ROUND_ALONE]
    assert column(rows["steps"], "method") == 2 * methods
    hidden = {row["method"]: row["hidden"] for row in rows["closures"]}
    assert hidden["SGP, overlap=1, closure"]
    assert not hidden["SGP"]
    assert column(rows["nonfinite"], "case") == 2 * [*gossip_cost.POLICIES]
    cases = [(row["method"], row["case"]) for row in rows["stragglers"]]
    names = names_of(trainers.BESIDE_STRAGGLERS)
    assert cases == [(name, each) for each in trainers.SCENARIOS for name in names]
    assert all(float(row["median_ms"]) > 0 for part in rows.values() for row in part)


@pytest.mark.slow
def test_pipeline(tmp_path):
    rows, pictures = dry_run("pipeline", tmp_path / "rows.csv")
    assert pictures == ["throughput", "bubbles"]
    limit = pipeline.LIMIT
    assert column(rows["throughput"], "system") == [limit, *names_of((*OURS, *PEERS))]
    compared = names_of((*pipeline.COMPARED, *pipeline.TORCHS))
    assert column(rows["small"], "system") == [limit, *compared]
    assert column(rows["limit"], "system") == [limit, "PipeOptim"]
    assert column(rows["link"], "system") == 2 * compared
    assert column(rows["bubbles"], "system") == names_of((*OURS, *DEEP_PEERS))
    ratio_is = {row["system"]: row["ratio_is"] for row in rows["small"]}
    assert ratio_is["OneForwardOneBackward"] == "speed of torch 1F1B"
    assert ratio_is["PipeOptim"] == "speed of the fastest of torch's"
    copies = {row["system"]: row["weight_copies"] for row in rows["bubbles"]}
    assert (copies["PipeDream"], copies["PipeOptim"]) == ("3 2 1", "2 2 1")


@pytest.mark.slow
def test_interlocking(tmp_path):
    rows, pictures = dry_run("interlocking", tmp_path / "rows.csv")
    assert pictures == ["windows", "straggler", "gradients-together"]
    sizes = interlocking.Dry()
    ours = names_of(every_window(sizes.ranks, sizes.sleeping_head))
    others = names_of(end_to_end(sizes.ranks, sizes.ranks))
    assert column(rows["windows"], "system") == [*ours, *others]
    assert column(rows["computing"], "system") == [*ours[: interlocking.CORES], *others]
    after = sizes.slowdown.slow + 1
    assert column(rows["straggler"], "case")[:after] == ["step t-1", "step t", "step t+1"]
    assert len(rows["straggler"]) == after * (sizes.ranks + 2)
    assert len(rows["cotangents"]) == 2 * len(interlocking.COUNTS) * len(sizes.computes)


@pytest.mark.slow
def test_compression(tmp_path):
    rows, pictures = dry_run("compression", tmp_path / "rows.csv")
    assert pictures == ["links", "encoding", "power-sgd"]
    linked = {row["system"]: row for row in rows["links"]}
    assert list(linked) == names_of(SYSTEMS)
    for name, row in linked.items():
        # What torch refuses is noted; ours must run.
        assert bool(row["median_ms"]) != bool(row["note"]), row
        assert not row["note"] or name.startswith("torch "), row
    assert linked["fp32"]["payload_share"] == "1.0000"
    assert float(linked["topk-ef"]["payload_share"]) < 0.022
    assert column(rows["cost"], "system") == [cost.BACKWARD, *names_of(CANDIDATES[1:])]
    assert len(set(column(rows["power_sgd"], "system"))) == 4
