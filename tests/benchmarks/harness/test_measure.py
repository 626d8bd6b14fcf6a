"""The benchmarks run, and their rows contain the columns' values."""

import csv
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as program
from benchmarks.harness import measure as module
from benchmarks.harness.measure import FIELDS, Case, HostBoundError, Provider, Time, measure


def test_rows_compare_with_our_op_and_with_a_copy():
    case = Case(
        "nothing", "case", 10_000, 80_000, [Provider("ours", int), Provider("peer", sum_up)]
    )
    rows = {row["provider"]: row for row in measure(case, turns=10)}
    assert list(rows) == ["ours", "peer", "copy (non-temporal)"]
    assert all(list(row) == FIELDS for row in rows.values())
    assert rows["ours"]["speedup_of_ours"] == "1.00"
    assert rows["copy (non-temporal)"]["of_copy"] == "1.000"
    ours, peer = (float(rows[name]["median_ms"]) for name in ("ours", "peer"))
    assert float(rows["peer"]["speedup_of_ours"]) == pytest.approx(peer / ours, rel=0.5)


def sum_up():
    return sum(range(100_000))


def test_slow_providers_are_called_twice_and_failing_ones_left_out(capsys):
    calls = []

    def fail():
        raise RuntimeError("not on this machine")

    def slow():
        calls.append(time.sleep(0.02))

    peers = [Provider("peer", slow), Provider("broken", fail)]
    case = Case("nothing", "case", 1000, 8000, [Provider("ours", int), *peers])
    rows = {row["provider"]: row for row in measure(case, turns=4, longest_call=0.01)}
    assert list(rows) == ["ours", "peer (one call)", "copy (non-temporal)"]
    assert len(calls) == 2
    row = rows["peer (one call)"]
    assert float(row["median_ms"]) >= 20
    assert row["p20_ms"] == row["median_ms"] == row["p80_ms"]
    left_out = "nothing, case, 1,000, broken: left out: RuntimeError: not on this machine"
    assert left_out in capsys.readouterr().out


def toys(monkeypatch):
    """Replace the benchmarks of the ops by two cases each, of an op of the same name."""

    def find(path):
        name = path.rpartition("bench_")[2]
        providers = [Provider("ours", int), Provider("peer", int)]
        numbers = 8, 64, providers, "cpu"
        module = SimpleNamespace()
        module.cases = lambda device, sizes: (Case(name, f"{name}-{i}", *numbers) for i in (1, 2))
        return module

    monkeypatch.setattr(program, "importlib", SimpleNamespace(import_module=find))


def test_rows_are_written_after_every_case_until_the_deadline(tmp_path, monkeypatch, capsys):
    path, measured = tmp_path / "rows.csv", []
    toys(monkeypatch)

    def measure_or_fail(case, turns, longest):
        measured.append(case.name)
        if case.name == "mix-2":
            raise RuntimeError("the second fails")
        if case.name == "top_k-2":
            assert path.read_text().count("\n") == 3  # the header and two cases
            monkeypatch.setattr(program.time, "monotonic", lambda: float("inf"))
        numbers = dict.fromkeys(FIELDS, "1")
        return [{**numbers, "op": case.op, "case": case.name, "numel": case.numel}]

    monkeypatch.setattr(program, "measure", measure_or_fail)
    arguments = ["--ops", "mix", "top_k", "quantize", "--seconds", "900", "--out", str(path)]
    monkeypatch.setattr(program.sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit, match=r"failed: mix, mix-2, 8$"):
        program.main()
    with path.open(newline="") as file:
        assert [row["case"] for row in csv.DictReader(file)] == ["mix-1", "top_k-1", "top_k-2"]
    printed = capsys.readouterr()
    assert "out of time: not measured from quantize, quantize-1, 8 on" in printed.out
    assert "the second fails" in printed.err


def test_cases_are_chosen_by_their_whole_names(monkeypatch):
    toys(monkeypatch)
    found = list(program.cases("cpu", [2**8], ["mix", "top_k"], r"mix-\d|top", peers=False))
    assert [case.name for case in found] == ["mix-1", "mix-2"]
    assert {len(case.providers) for case in found} == {1}


def test_our_own_failure_is_raised():
    case = Case("nothing", "case", 10, 80, [Provider("ours", lambda: 1 / 0), Provider("peer", int)])
    with pytest.raises(ZeroDivisionError):
        measure(case, turns=1, longest_call=1.0)


class FakeGPU:
    """A GPU and its host, whose clocks move by what they are said to take."""

    def __init__(self, monkeypatch):
        self.host = self.device = 0.0  # seconds, when each is done with what it has been given
        self.delays = []  # of the host, in the next calls
        cuda = SimpleNamespace(
            Event=self.make_event, _sleep=lambda cycles: self.work(0, cycles / 2e9),
        )  # fmt: skip
        clock = SimpleNamespace(perf_counter=lambda: self.host)
        monkeypatch.setattr(module.torch, "cuda", cuda)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "copy_provider", lambda case: self.provider("copy", 1e-5, 1e-3))

    def work(self, host, device):
        self.host += host
        self.device = max(self.host, self.device) + device

    def wait(self):
        self.host = self.device = max(self.host, self.device)

    def make_event(self, enable_timing):
        event = SimpleNamespace()
        event.record = lambda: vars(event).update(at=max(self.host, self.device))
        event.synchronize = self.wait
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def provider(self, name, host, device):
        return Provider(name, lambda: self.work(self.delays.pop() if self.delays else host, device))


def test_times_on_a_gpu_are_its_own(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    providers = [gpu.provider("ours", 3e-5, 5e-6), gpu.provider("peer", 2e-3, 4e-3)]
    case = Case("nothing", "case", 2**21, 8, providers, "cuda")
    found = {row["provider"]: (row["median_ms"], row["host_ms"]) for row in measure(case, turns=3)}
    assert found == {
        "ours": ("0.0050", "0.0300"), "peer": ("4.0000", "2.0000"), "copy": ("1.0000", "0.0100"),
    }  # fmt: skip


def test_a_turn_in_which_the_host_was_held_up_is_taken_again(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    gpu.delays = [0.015]
    run = gpu.provider("ours", 3e-5, 5e-6).run
    assert module.time_turn(run, "cuda", Time(1e-3, 3e-5)) == pytest.approx((5e-6, 3e-5))
    assert not gpu.delays


def test_rows_of_the_hosts_time_are_refused(monkeypatch, capsys):
    gpu = FakeGPU(monkeypatch)
    gpu.delays = 50 * [0.03]
    with pytest.raises(HostBoundError, match=r"took 30\.0+ ms to enqueue 1 calls, and"):
        module.time_once(gpu.provider("slow", 0, 1e-3).run, "cuda")
    gpu.delays = []
    delays = iter([1e-5, 1e-5, *100 * [0.03]])  # slower once it has been tried out
    slower = Provider("slower", lambda: gpu.work(next(delays), 1e-3))
    providers = [gpu.provider("ours", 1e-5, 1e-3), gpu.provider("slow", 0.03, 1e-3), slower]
    case = Case("nothing", "case", 2**21, 8, providers, "cuda")
    assert [row["provider"] for row in measure(case, turns=2)] == ["ours", "copy"]
    printed = capsys.readouterr().out
    assert "slow: left out: HostBoundError: the host took 30.000 ms to enqueue 1 calls" in printed
    assert "slower: refused: the host took" in printed
    with pytest.raises(HostBoundError):
        measure(replace(case, providers=providers[1:]), turns=2)
