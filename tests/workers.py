"""Gloo ranks as processes forked from a warm server, with a time limit and logged stack traces.

`run_ranks` and `observe_ranks` start processes for one function; a `RankPool` keeps its processes,
so that a function that starts and ends cleanly costs a process group instead of processes.
"""

import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A process forked after CUDA has started cannot use it, and importing the package asks for GPUs.
_CONTEXT = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
# What ranks would otherwise import each; creating an optimizer imports torch._dynamo.
_TRAINERS = [f"pyparallel.{name}" for name in ("compression", "gossip", "pipeline", "subnets")]
if not torch.cuda.is_available():
    _CONTEXT.set_forkserver_preload(["torch._dynamo", *_TRAINERS, "pytest"])
_NO_RESULT = "ended without a result (killed, or its time limit: see the stacks)"


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: its function's return value, or the error it raised.

    The exit code is None in a pool, whose processes live on.
    """

    value: Any
    error: str | None
    exit_code: int | None
    log: str


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, time_limit: float = 150
) -> list[Any]:
    """Return function(rank, *arguments) of each rank of a gloo group; all must succeed."""
    return _values(observe_ranks(num_ranks, function, *arguments, time_limit=time_limit))


def _values(outcomes: list[Outcome]) -> list[Any]:
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error]
    report = "\n".join(f"--- rank {r}: {outcomes[r].error}\n{outcomes[r].log}" for r in failed)
    assert not failed, f"ranks {failed} of {len(outcomes)} failed\n{report}"
    return [outcome.value for outcome in outcomes]


def observe_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    time_limit: float = 150,
    group_timeout: float = 60,
) -> list[Outcome]:
    """Run as `run_ranks`, for tests in which ranks may fail."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run_rank,
                args=(rank, num_ranks, folder, sender, time_limit, group_timeout),
                kwargs={"function": function, "arguments": arguments},
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        deadline = (
            time.monotonic() + time_limit + 10
        )  # after a rank's own limit, which prints its stacks
        return [
            _outcome(pipe, process, Path(folder, f"log-{rank}"), deadline)
            for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True))
        ]


def _outcome(pipe: Any, process: Any, log: Path, deadline: float) -> Outcome:
    value, error = None, _NO_RESULT
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            value, error = pickle.loads(pipe.recv_bytes())
    except EOFError:
        pass  # the rank died: the error is set above
    process.join(max(0.0, deadline - time.monotonic()))
    process.kill()  # a stopped process does not enforce its own limit
    process.join()
    return Outcome(value, error, process.exitcode, log.read_text() if log.exists() else "")


def _run_rank(
    rank: int,
    num_ranks: int,
    folder: str,
    sender: Any,
    time_limit: float,
    group_timeout: float,
    *,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    log = os.open(Path(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(time_limit, exit=True, file=sys.__stderr__)
    torch.set_num_threads(1)
    _join_group(dist.FileStore(f"{folder}/store", num_ranks), rank, num_ranks, group_timeout)
    store_barrier()  # a rank that finishes at once must not exit while others connect
    try:
        _send(sender, function(rank, *arguments), None)
    except BaseException as error:
        traceback.print_exc()
        _send(sender, None, f"{type(error).__name__}: {error}")
        sys.exit(1)
    dist.destroy_process_group()


def _join_group(store: dist.Store, rank: int, num_ranks: int, group_timeout: float) -> None:
    torch.manual_seed(rank)
    timeout = datetime.timedelta(seconds=group_timeout)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def store_barrier(name: str = "connected") -> None:
    """Wait for all ranks through the store, whose entries outlive a rank that dies afterwards.

    A collective barrier does not do before a death: a rank that has left it may disconnect others
    still in it.
    """
    store = dist.group.WORLD.get_group_store()
    store.set(f"{name}/{dist.get_rank()}", "")
    store.wait([f"{name}/{rank}" for rank in range(dist.get_world_size())])


def assert_equal_on_all_ranks(value: Any) -> None:
    """Compare a value with those of the other ranks."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    assert everywhere == [value] * len(everywhere)


def call_each(rank: int, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Make calls, each of a function and its arguments, in one group; an error names its call."""
    results = []
    for function, *arguments in calls:
        try:
            results.append(function(rank, *arguments))
        except BaseException as error:
            error.add_note(f"in {function.__name__} of {arguments}")
            raise
    return results


def on_ranks(num_ranks: int) -> Callable[[Callable[[int], object]], Callable[["RankPool"], None]]:
    """Make a test of a function of the rank, which all ranks of a pool run."""

    def decorate(function: Callable[[int], object]) -> Callable[["RankPool"], None]:
        def test(ranks: RankPool) -> None:
            ranks.run(num_ranks, _run_test, function.__module__, function.__name__)

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        test.__module__, test.on_rank = function.__module__, function  # type: ignore[attr-defined]
        return test

    return decorate


def _run_test(rank: int, module: str, name: str) -> None:
    getattr(importlib.import_module(module), name).on_rank(rank)


def _send(sender: Any, value: Any, error: str | None) -> None:
    # By value: Connection.send shares tensors' memory, which is freed when the rank exits.
    sender.send_bytes(pickle.dumps((value, error)))


class RankPool:
    """Processes that run one function after another, each on a process group of its own.

    A function may raise on some ranks; one that kills, stops or leaves a process, or whose ranks
    must exit as interpreters do, needs `observe_ranks`. A process that ends, or exceeds its time
    limit, is an error of its rank, and the next function gets new processes.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._workers: list[tuple[Any, Any, Path]] = []
        self._num_runs = 0
        self._num_started = 0
        # This process outlives all ranks. A FileStore, which polls, would make each group slow.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        time_limit: float = 150,
        group_timeout: float = 20,
    ) -> list[Any]:
        """Return function(rank, *arguments) of each rank of a gloo group; all must succeed."""
        limits = {"time_limit": time_limit, "group_timeout": group_timeout}
        return _values(self.observe(num_ranks, function, *arguments, **limits))

    def run_each(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        rows: Iterable[tuple[Any, ...]],
        **limits: float,
    ) -> list[tuple[Any, ...]]:
        """Return function(rank, *row) for each row, of all ranks; they share a group."""
        calls = [(function, *row) for row in rows]
        return list(zip(*self.run(num_ranks, call_each, calls, **limits), strict=True))

    def observe(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        time_limit: float = 150,
        group_timeout: float = 20,
    ) -> list[Outcome]:
        """Run as `run`, for functions that may raise."""
        while len(self._workers) < num_ranks:
            self._start_worker()
        self._num_runs += 1
        deadline = time.monotonic() + time_limit + 10
        workers = self._workers[:num_ranks]
        for rank, (pipe, _, _) in enumerate(workers):
            limits = time_limit, group_timeout
            job = self._num_runs, rank, num_ranks, limits, function, arguments
            pipe.send_bytes(pickle.dumps(job))
        outcomes, healthy = [], True
        for pipe, process, log in workers:
            value, error = None, _NO_RESULT
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    value, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process.join()  # its log is complete
            healthy = healthy and error != _NO_RESULT
            outcomes.append(Outcome(value, error, None, log.read_text()))
        if not healthy:
            self._end_workers()
        return outcomes

    def close(self) -> None:
        """End all processes."""
        self._end_workers()
        self._folder.cleanup()

    def _end_workers(self) -> None:
        for _, process, _ in self._workers:
            process.kill()
            process.join()
        self._workers = []

    def _start_worker(self) -> None:
        self._num_started += 1
        log = Path(self._folder.name, f"log-{self._num_started}")
        ours, theirs = _CONTEXT.Pipe()
        arguments = theirs, self._store.port, str(log)
        process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._workers.append((ours, process, log))


def _serve(pipe: Any, port: int, log_path: str) -> None:
    """Run functions until the parent ends."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    environment = dict(os.environ)
    # One connection for all runs: for each, torch asks the name server who 127.0.0.1 is.
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        gc.collect()  # what the last run's group held
        gc.freeze()  # what is left stays: each run's collection passes over the run's own objects
        try:
            run, rank, num_ranks, limits, function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        os.ftruncate(log, 0)
        # Functions leave no traces: Accelerate, for one, sets variables and the number of threads.
        torch.set_num_threads(1)
        os.environ.clear()
        os.environ.update(environment)
        _forget_the_run_before()
        faulthandler.dump_traceback_later(limits[0], exit=True, file=sys.__stderr__)
        group_store = dist.PrefixStore(f"run-{run}", store)
        result = _run_on_own_group(group_store, rank, num_ranks, limits[1], function, arguments)
        faulthandler.cancel_dump_traceback_later()
        _send(pipe, *result)
        del function, arguments, result  # a trainer that they hold would be kept by freeze()


def _forget_the_run_before() -> None:
    """Leave no trainer that errors would count, nor what torch keeps of the run before."""
    run, rules = map(sys.modules.get, ("pyparallel.comm.run", "torch._dynamo.trace_rules"))
    if run is not None:
        run.Run._open.clear()
    if rules is not None:  # with DDP among what dynamo inlines, no other DDP compiles
        rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")
        rules.get_legacy_mod_inlinelist.cache_clear()
    if "torch.distributed.tensor" in sys.modules:  # it caches specs, with meshes of ended groups
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


def _run_on_own_group(
    store: dist.Store,
    rank: int,
    num_ranks: int,
    group_timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> tuple[Any, str | None]:
    _join_group(store, rank, num_ranks, group_timeout)
    try:
        store_barrier()
        value, error_text = function(rank, *arguments), None
        store_barrier("done")  # no rank may leave while another still receives from it
    except BaseException as error:
        traceback.print_exc()
        value, error_text = None, f"{type(error).__name__}: {error}"
        dist.group.WORLD.get_group_store().set(f"done/{rank}", "")
    gc.collect()  # trainers in reference cycles close before their group ends
    dist.destroy_process_group()
    return value, error_text
