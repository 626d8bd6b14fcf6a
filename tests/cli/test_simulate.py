"""``python -m pyparallel simulate``: the table, its files, and what it refuses."""

import importlib.util
import re
import sys

import pytest

from pyparallel.__main__ import main
from pyparallel.compression import ErrorFeedback, Int8
from pyparallel.gossip import SGP, Hierarchical, NoLoCo, SlowMo
from pyparallel.gossip.topology import (
    HierarchicalTopology,
    OnePeerExponential,
    Phases,
    RandomMatching,
    Ring,
)
from pyparallel.pipeline import Displacement, GPipe, PipeDream2BW, PipeOptim, Rollout
from pyparallel.planning.simulate import (
    Failures,
    Links,
    Profile,
    Stragglers,
    Uplink,
    parse_algorithm,
    parse_schedule,
)
from tests.cases import slow

LINKS = """\
ranks = 16
rate = 1000  # Mbit/s of a machine's card
latency = 0.1
all_reduce = "ring"

[machines]
ranks = 4
rate = 80_000
latency = 0.01
cores = 2

[regions]
ranks = 8
rate = 500
latency = 30

[[slow]]
edges = [[0, 4]]
rate = 10

[[slow]]
ranks = [3, 5]
computing = 3.0
"""


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Run the command in this process, in another folder; return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["pyparallel", "simulate", *arguments])
        main()
        return capsys.readouterr().out

    return run_here


@pytest.fixture
def refused(call):
    """Return the sentence with which the command ends."""

    def run_here(*arguments):
        with pytest.raises(SystemExit) as ended:
            call("--rounds", "3", *arguments)
        return str(ended.value.code)

    return run_here


def rows_of(printed):
    _, *lines = printed.split("\n\n")[1].splitlines()
    return {name: row.split() for name, row in zip(lines[::2], lines[1::2], strict=True)}


def test_the_table_has_the_algorithm_beside_all_reduce(call):
    arguments = ("--rate", "1000", "--latency", "0", "--compute", "0.5", "--parameters", "25e6",
                 "--rounds", "50")  # fmt: skip
    printed = call(*arguments)
    assert printed.startswith("8 ranks on 8 machines, a model of 100.0 MB, computing 0.5 s, 50")
    rows = rows_of(printed)
    # A message of 0.8 s hides a gradient of 0.5 s; each rank sends it once.
    name = "SGP(overlap=1)"
    assert rows[name][:4] == ["0.810", "0.800-0.800", "38.3%", "100.0"]
    # Four buckets: the first begins after a third of the step and a quarter of the rest.
    assert rows["AllReduce()"][:4] == ["1.650", "1.650-1.650", "69.7%", "175.0"]
    assert rows["AllReduce()"][-2:] == ["exact", "0.00"]
    assert printed == call(*arguments)
    two = rows_of(call(*arguments, "--algorithm", "LocalSGD(5)", "--algorithm", "SGP(Ring)"))
    assert list(two) == ["LocalSGD(5)", "SGP(Ring)", "AllReduce()"]


def test_the_table_fits_80_columns(call):
    arguments = ("--ranks", "2048", "--rate", "300", "--parameters", "2e9", "--compute", "100",
                 "--rounds", "20", "--stragglers", "lognormal:0.5")  # fmt: skip
    printed = call(*arguments)
    assert "MB, computing 100 s," in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_stragglers_and_failures(call):
    arguments = ("--rate", "1000", "--compute", "0.5", "--message-bytes", "1e5", "--rounds", "200")
    plain = rows_of(call(*arguments))
    varied = rows_of(call(*arguments, "--stragglers", "lognormal:0.3,slow:0=2.0"))
    assert float(varied["AllReduce()"][0]) > 1.9 * float(plain["AllReduce()"][0])
    failing = rows_of(call(*arguments, "--failures", "mtbf=600,restart=100,checkpoint=200"))
    assert failing["AllReduce()"][4] == "75.0%"
    name = "SGP(overlap=1)"
    assert failing[name][4] == f"{600 / 602 * 4800 / 4900:.1%}"
    assert plain[name][4] == "100.0%"
    pairs = ("--algorithm", "ADPSGD(Ring())", "--failures", "mtbf=600,restart=100,checkpoint=200")
    varied = rows_of(call(*arguments, *pairs, "--stragglers", "lognormal:0.1,slow:0=4.0"))
    assert float(varied["ADPSGD(Ring())"][0]) < 0.3 * float(varied["AllReduce()"][0])
    assert varied["ADPSGD(Ring())"][4] == failing[name][4]


def test_a_pipeline_has_all_reduce_beside_it_with_a_flush(call):
    arguments = (
        *("--ranks", "16", "--stages", "4", "--rate", "1000", "--latency", "0", "--rounds", "100"),
        *("--compute", "1.6", "--parameters", "25e6", "--activation-bytes", "0"),
    )
    printed = call(*arguments)
    assert "\nreplicas of 4 stages with 8 microbatches, OneForwardOneBackward()" in printed
    rows = rows_of(printed)
    assert list(rows) == ["SGP(overlap=1)", "AllReduce()"]
    # 8 microbatches and 3 of warm-up, of 0.05 s; 25 MB in 0.2 s, or six quarters of it after them.
    assert rows["AllReduce()"][:2] == ["0.850", "0.850-0.850"]
    assert rows["AllReduce()"][3] == "37.5"
    assert rows["SGP(overlap=1)"][1] == "0.550-0.550"
    streaming = (
        "--schedule",
        "PipeDream2BW()",
        "--microbatches",
        "4",
        "--algorithm",
        "SGP(Ring(4))",
    )
    rows = rows_of(call(*arguments, *streaming))
    assert list(rows) == ["SGP(Ring(4))", "AllReduce() of OneForwardOneBackward()"]
    # An update each 0.4 s, whose round sends two messages over a link.
    assert rows["SGP(Ring(4))"][1] == "0.800-0.800"
    wide = call(*arguments, "--schedule", "PipeOptim('consistent', Rollout(0.5))")
    assert max(map(len, wide.splitlines())) <= 80


def test_schedules_are_read_as_they_are_written_in_python():
    for text, expected in [
        ("GPipe()", GPipe()),
        ("PipeOptim(synchronous_updates=9)", PipeOptim(synchronous_updates=9)),
        ("PipeOptim('consistent', Rollout(0.5))", PipeOptim("consistent", Rollout(0.5))),
        ("PipeDream2BW(prediction=Displacement())", PipeDream2BW(prediction=Displacement())),
    ]:
        assert repr(parse_schedule(text)) == repr(expected)


def test_mistakes_in_a_pipeline_are_refused(refused):
    own = ("--rate", "1", "--compute", "1", "--stages", "4")
    sized = (*own, "--activation-bytes", "0")
    for arguments, sentence in [
        (own, "--stages and --activation-bytes must be given with a pipeline, got stages"),
        ((*own[:4], "--schedule", "GPipe()", "--microbatches", "2"),
         "must be given with a pipeline, got schedule, microbatches"),
        ((*sized, "--ranks", "6"), "num_ranks must be a multiple of 4 stages, got 6"),
        ((*sized, "--loss", "logistic"), "objective must come without a pipeline, got Pipeline("),
        ((*own, "--activation-bytes", "-1"), "activation_bytes must be in [0, inf), got -1.0"),
        ((*sized, "--stages", "0"), "num_stages must be a positive integer, got 0"),
        ((*sized, "--microbatches", "0"), "num_microbatches must be a positive integer, got 0"),
        ((*sized, "--schedule", "PipeDream2BW(prediction=Displacement())", "--microbatches", "2"),
         "num_microbatches must be at least num_stages - 1 for PipeDream2BW"),
        ((*sized, "--schedule", "PipOptim()"),
         "PipOptim must be the name of a schedule or a prediction; did you mean PipeOptim?"),
        ((*sized, "--schedule", "GPipe"), "got the class GPipe; write GPipe(...)"),
        ((*sized, "--schedule", "Rollout()"), "must be such as PipeOptim(), got 'Rollout()'"),
        ((*sized, "--schedule", "PipeOptim(synchronous_updates='warm-up')"),
         "synchronous_updates must be a number without a trainer, got 'warm-up'"),
        ((*sized, "--schedule", "PipeDream()", "--algorithm", "AllReduce()"),
         "replicas must average weights with PipeDream"),
        ((*sized, "--algorithm", "SGP(Ring(8))"), "replicas must be for the mesh's 2"),
        ((*sized, "--algorithm", "ADPSGD(Ring())"), "others are not simulated with a pipeline"),
    ]:  # fmt: skip
        assert sentence in refused(*arguments), arguments


def test_links_and_profile_of_files(call, tmp_path):
    (tmp_path / "links.toml").write_text(LINKS)
    Profile(0.25, 0.4, 0.01, 0.002).write(tmp_path / "profile.json")
    printed = call("--ranks", "16", "--links", "links.toml", "--profile", "profile.json")
    assert "16 ranks on 4 machines, a model of 100.0 MB, computing 0.25 s" in printed
    links = Links.read(tmp_path / "links.toml", 16)
    assert links == Links(
        (Uplink(1, 1e10, 1e-5), Uplink(4, 1.25e8, 1e-4), Uplink(8, 6.25e7, 0.03)),
        {(0, 4): (1.25e6, 0.0)}, {3: 3.0, 5: 3.0}, card=1, cores=2, all_reduce="ring",
    )  # fmt: skip
    assert links.computing(16)[[0, 3]].tolist() == [2.0, 6.0]  # four ranks share two cores
    assert Profile.read(tmp_path / "profile.json") == Profile(0.25, 0.4, 0.01, 0.002)
    Profile(0.25, rate=1.25e8, latency=1e-4).write(tmp_path / "profile.json")
    assert call("--profile", "profile.json", "--rounds", "9") == call(
        "--compute", "0.25", "--rate", "1000", "--latency", "0.1", "--rounds", "9"
    )


def test_the_picture(call, tmp_path):
    pytest.importorskip("matplotlib")
    printed = call("--rate", "1000", "--compute", "0.5", "--rounds", "20", "--out", "runs.svg")
    assert printed.endswith("picture  runs.svg\n")
    assert (tmp_path / "runs.svg").stat().st_size > 10_000


@pytest.mark.parametrize("loss", ["quadratic", slow("logistic")])
def test_losses_are_shown_when_asked(call, tmp_path, loss):
    arguments = ("--ranks", "16", "--rate", "300", "--parameters", "2e9", "--compute", "100",
                 "--rounds", "200", "--stragglers", "lognormal:0.5",
                 "--algorithm", "LocalSGD(40)", "--algorithm", "ADPSGD(Ring())")  # fmt: skip
    plain, asked = call(*arguments), call(*arguments, "--loss", loss)
    assert not re.search("loss", plain)
    assert max(map(len, asked.splitlines())) <= 80
    assert "\nloss       of the mean of the ranks' parameters" in asked
    assert "consensus" not in asked
    before, rows = rows_of(plain), rows_of(asked)
    assert {name: row[:-1] for name, row in rows.items()} == {
        name: row[:-1] for name, row in before.items()
    }
    assert 0 < float(rows["AllReduce()"][-1]) < float(rows["LocalSGD(40)"][-1]) < 0.1
    options = ("--learning-rate", "0.2", "--heterogeneity", "0")
    equal = rows_of(call(*arguments, "--loss", loss, *options))
    assert equal["LocalSGD(40)"][-1] != rows["LocalSGD(40)"][-1]
    if importlib.util.find_spec("matplotlib"):
        sizes = []
        for each in ((), ("--loss", loss)):
            call("--rate", "1", "--compute", "1", "--rounds", "9", *each, "--out", "runs.svg")
            sizes.append((tmp_path / "runs.svg").read_text().count('id="axes_'))
        assert sizes == [2, 3]


def test_algorithms_are_read_as_they_are_written_in_python():
    for text, expected in [
        ("SGP(OnePeerExponential, overlap=1)", SGP(OnePeerExponential(8), overlap=1)),
        ("SGP(Ring(8))", SGP(Ring(8))),
        ("SGP(OnePeerExponential(peers=2), compressor=Int8())",
         SGP(OnePeerExponential(8, peers=2), compressor=Int8())),
        ("NoLoCo(RandomMatching(seed=3), 20, pull=0.5)",
         NoLoCo(RandomMatching(8, 3), 20, pull=0.5)),
        ("SGP(HierarchicalTopology(ranks_per_node=2, between=Ring))",
         SGP(HierarchicalTopology(8, 2, Ring))),
        ("Hierarchical(SGP(Ring()), 4)", Hierarchical(SGP(Ring(2)), 4)),
        ("SlowMo(SGP(Phases([(Ring, 9), (OnePeerExponential(), None)])), 12)",
         SlowMo(SGP(Phases([(Ring(8), 9), (OnePeerExponential(8), None)])), 12)),
        ("NoLoCo(RandomMatching, compressor=ErrorFeedback(Int8(), decay=0.9))",
         NoLoCo(RandomMatching(8), compressor=ErrorFeedback(Int8(), decay=0.9))),
    ]:  # fmt: skip
        assert repr(parse_algorithm(text, 8)) == repr(expected)


def test_nothing_else_is_run_as_code(refused):
    rate = ("--rate", "1", "--compute", "1")
    for text, sentence in [
        ("__import__('os').system('true')", r"must be a number, a text, or a constructor's call"),
        ("open('x')", "open must be the name of an algorithm, a topology or a compressor"),
        ("SPG(Ring())", r"SPG must be the name of .*; did you mean SGP\?"),
        ("SGP(Ring(), overlap=1 + 1)", r"1 \+ 1 must be a number"),
        ("SGP(Ring(), **{'overlap': 1})", r"\*\* must not be used"),
        ("SGP(Ring()", "must be such as .* was never closed"),
        ("SGP", r"got the class SGP; write SGP\(...\)"),
        ("Ring()", "algorithm must be such as SGP"),
        ("SGP(Hypercube(), 1)", "num_ranks must be a power of two, got 12; the nearest are 8"),
        ("SGP(Ring(4))", "topology must be for the process group's 12 ranks"),
        ("EASGD()", r"algorithm must be one of AllReduce, .*: others are not simulated"),
        ("ADPSGD(OnePeerExponential())", r"topology must be symmetric for ADPSGD"),
        ("SGP(Ring(), overlap=-1)", "overlap must be a number of steps"),
    ]:
        assert re.search(sentence, refused("--ranks", "12", "--algorithm", text, *rate)), text


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("ranks = 16", "ranks = 8", "line 1: ranks must be the run's 16, got 8"),
        ("rate = 1000 ", "rate = 0 ", "line 2: rate must be a number greater than 0, got 0"),
        ("rate = 500", "rate = -1", "line 14: rate must be a number greater than 0, got -1"),
        ("rate = 500", "rate = nan", "line 14: rate must be a number greater than 0, got nan"),
        ("rate = 10\n", 'rate = "a"\n', "line 19: rate must be a number greater than 0, got 'a'"),
        ("rate = 10\n", "", "line 17: rate must be given"),
        ("latency = 30", "latncy = 30", "line 15: latncy must be one of ranks, rate, latency"),
        ("ranks = 4", "ranks = 5", "line 7: ranks must divide the run's 16, got 5"),
        ("ranks = 8", "ranks = 2", "line 13: ranks must .* be several times a machine's 4, got 2"),
        ("cores = 2", "cores = 0", "line 10: cores must be a positive integer, got 0"),
        ('"ring"', '"star"', "line 4: all_reduce must be 'ring' or 'tree', got 'star'"),
        ("[[0, 4]]", "[[0, 16]]", r"line 18: edges must be pairs of ranks from 0 to 15, got"),
        ("[3, 5]", "[3, -5]", r"line 22: ranks must be ranks from 0 to 15, got \[-5\]"),
        ("computing = 3.0", "computing = 0", "line 23: computing must be a number greater than 0"),
        ("ranks = [3, 5]\n", "", "line 21: slow must have edges with a rate, or ranks with comp"),
        ("[[0, 4]]", "4", "line 18: edges must be pairs of ranks from 0 to 15, got 4"),
        ("latency = 0.1\n", "latency\n", "line 3"),
    ],
)  # fmt: skip
def test_mistakes_in_links_are_refused_with_their_line(refused, tmp_path, old, new, sentence):
    assert old in LINKS
    (tmp_path / "links.toml").write_text(LINKS.replace(old, new, 1))
    found = refused("--ranks", "16", "--links", "links.toml", "--compute", "1")
    assert re.match(rf"simulate: links\.toml\b.*{sentence}", found), found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"version": 2,\n "computing": 1}', ", line 1: version must be 1, got 2"),
        ('{"computing": 1}', ": version must be 1, got None"),
        ('{"version": 1,\n"computing": 0}', ", line 2: computing must be a number greater than 0"),
        ('{"version": 1}', ": computing must be given"),
        ('{"version": 1,\n"computing": 1,\n"speed": 1}', ", line 3: speed must be one of"),
        ('{"version": 1,\n"computing": 1,\n"forward_share": 1}', ", line 3: forward_share must be"),
        ("[]", " must hold a table, got list"),
        ('{"version": 1,\n', ": Expecting property name enclosed in double quotes: line 2 col"),
    ],
)  # fmt: skip
def test_mistakes_in_a_profile_are_refused_with_their_line(refused, tmp_path, text, sentence):
    (tmp_path / "profile.json").write_text(text)
    found = refused("--profile", "profile.json", "--rate", "1")
    assert found.startswith(f"simulate: profile.json{sentence}"), found


def test_mistakes_in_arguments_are_refused(refused):
    rate = ("--rate", "1000", "--compute", "1")
    for arguments, sentence in [
        (["--ranks", "0", *rate], "--ranks must be at least 1, got 0"),
        (["--rate", "0", "--compute", "1"], "rate must be greater than 0 and finite, got 0.0"),
        (["--compute", "1"], "--links or --rate must be given, or a profile with a rate"),
        (["--rate", "1"], "one of --compute and --profile must be given, got 0"),
        ([*rate, "--links", "x.toml"], "--links must come without --rate, --latency and --all"),
        (["--compute", "1", "--links", "x.toml", "--latency", "0"], "--all-reduce, got latency"),
        (["--rate", "1", "--latency", "-1", "--compute", "1"], "latency must not be negative"),
        (["--compute", "1", "--links", "x.toml"], "x.toml: [Errno 2] No such file"),
        ([*rate, "--stragglers", "normal:1"], "stragglers must be such as lognormal:0.1 or slow"),
        ([*rate, "--stragglers", "slow:9=2"], "slow ranks must be from 0 to 7, got [9]"),
        (
            [*rate, "--stragglers", "lognormal:-1"],
            "lognormal of stragglers must be finite and not negative, got -1.0",
        ),
        ([*rate, "--failures", "mtbf=0"], "mtbf must be greater than 0, got 0.0"),
        ([*rate, "--failures", "restart=1"], "and the first of them, got restart=1"),
        ([*rate, "--failures", "mtbf=9,repair=1"], "failures must be of mtbf, restart, checkpoint"),
        ([*rate, "--failures", "mtbf"], "failures must be such as mtbf=3600, got mtbf"),
        ([*rate, "--rounds", "0"], "num_steps must be a positive integer, got 0"),
        ([*rate, "--message-bytes", "0"], "message_bytes must be greater than 0, got 0.0"),
        ([*rate, "--parameters", "-1"], "message_bytes must be greater than 0, got -4.0"),
        (
            [*rate, "--learning-rate", "1"],
            "--learning-rate and --heterogeneity must come with --loss, got learning_rate",
        ),
        (
            [*rate, "--loss", "quadratic", "--learning-rate", "-1"],
            "learning_rate must be positive, got -1.0",
        ),
        (["--rate", "1", "--compute", "0"], "--compute must be greater than 0, got 0.0"),
    ]:
        assert sentence in refused(*arguments), arguments


def test_goodput_by_who_stops():
    """One machine, one learner or everything; failures hit what runs."""
    often = Failures(mtbf=100.0, restart=50.0, checkpoint=100.0, detect=1.0, learners=10)
    everything = often.goodput(64, by_gossip=False, has_learners=False)
    assert everything == pytest.approx(100 / (100 + 50 + 50))
    assert often.goodput(64, by_gossip=False, has_learners=True) == pytest.approx(1000 / 1050)
    gossip = often.goodput(64, by_gossip=True, has_learners=False)
    assert gossip == pytest.approx(100 / 101 * 6400 / 6450)


def test_texts_of_stragglers_and_failures():
    assert Stragglers.parse("lognormal:0.1,slow:0=3,slow:2=1.5") == Stragglers(
        0.1, {0: 3.0, 2: 1.5}
    )
    assert Stragglers.parse("") == Stragglers()
    assert Failures.parse("mtbf=60, learners=8") == Failures(60.0, learners=8)
