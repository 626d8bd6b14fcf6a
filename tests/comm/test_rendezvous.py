"""A rank that cannot reach the port by which the ranks find each other: one error, and in time."""

import importlib
import socket
import sys

import pytest

from pyparallel.comm import rendezvous, wait_for_store


@pytest.fixture
def bound():
    """Return a socket with a port that nobody else gets, and which does not listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.fixture
def port(bound, monkeypatch):
    """Return the port of this machine that rank 1 is told, on which nobody listens."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    found = str(bound.getsockname()[1])
    for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": found}.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def at_once(monkeypatch):
    """Let the waits of a minute end at once."""
    monkeypatch.setattr(wait_for_store, "__defaults__", (0.0,))


def test_a_port_on_which_nobody_listens_is_one_sentence(port):
    with pytest.raises(ConnectionError) as raised:
        wait_for_store(0.3)
    assert str(raised.value) == (
        f"rank 1 on {socket.gethostname()} cannot reach 127.0.0.1:{port} of rank 0 after 0.3 s "
        "(Connection refused): set MASTER_ADDR to the host of rank 0, and MASTER_PORT to one port "
        f"on all ranks, and open the port between the hosts: `nc -vz 127.0.0.1 {port}` must "
        "succeed there"
    )


def test_under_torchrun_rank_0_waits_too(port, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConnectionError, match=r"of torchrun after 0 s .*give .* --local-addr"):
        wait_for_store(0.0)


def test_a_host_without_an_address_is_named(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "rank-0.invalid")
    with pytest.raises(ConnectionError, match=r"rank-0.invalid:\d+ of rank 0 .* \(.*[Nn]ame"):
        wait_for_store(0.0)


def test_a_rank_waits_until_rank_0_listens(bound, port, monkeypatch):
    monkeypatch.setattr(rendezvous.time, "sleep", lambda _: bound.listen())
    wait_for_store(5.0)


def test_rank_0_and_a_process_without_a_launcher_do_not_wait(port, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    wait_for_store()
    monkeypatch.delenv("RANK")
    wait_for_store()


def test_the_examples_end_with_the_sentence(port, at_once, monkeypatch):
    monkeypatch.syspath_prepend("examples")
    with pytest.raises(SystemExit, match=f"rank 1 .* cannot reach .*:{port} of rank 0 after 0 s"):
        importlib.import_module("ranks").join_ranks(0)


def test_commands_end_with_the_sentence(port, at_once, monkeypatch):
    main = importlib.import_module("pyparallel.__main__").main
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for arguments in (["doctor", "--links"], ["recommend", "--parameters", "1e6"]):
        monkeypatch.setattr(sys, "argv", ["pyparallel", *arguments])
        sentence = f"{arguments[0]}: rank 1 .* cannot reach .*:{port} of rank 0 after 0 s"
        with pytest.raises(SystemExit, match=sentence):
            main()
