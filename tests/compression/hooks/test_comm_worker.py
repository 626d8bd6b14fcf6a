import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from pyparallel.compression.hooks.comm_worker import ThreadWorker
from tests.workers import observe_ranks


def test_jobs_run_in_order_in_the_background():
    worker, order = ThreadWorker(), []
    release = threading.Event()

    def wait():
        release.wait()
        order.append("first")

    result = torch.zeros(1)
    first = worker.start(wait, result)
    second = worker.start(lambda: order.append("second"), result)
    assert not first.done()
    release.set()
    assert second.wait() is result
    assert order == ["first", "second"]
    assert first.wait() is result


def test_a_future_raises_its_job_s_error_and_later_jobs_run():
    worker = ThreadWorker()

    def fail():
        time.sleep(0.01)
        raise ValueError("no more paper")

    failed = worker.start(fail, torch.zeros(1))
    assert worker.start(lambda: None, torch.ones(1)).wait() == 1
    with pytest.raises(RuntimeError, match="no more paper"):
        failed.wait()


def test_what_a_job_holds_is_released_before_its_future_completes():
    class Held:
        pass

    begin, release = threading.Event(), threading.Event()
    held = Held()
    ended = weakref.ref(held)
    future = ThreadWorker().start(lambda held=held: begin.wait(), torch.zeros(1))
    del held
    future.then(lambda _: release.wait(10))  # keeps the thread where it has just completed it
    begin.set()
    future.wait()
    assert ended() is None
    release.set()


WORKERS = []  # objects that live as long as their process


def block(rank):
    running = threading.Event()

    def wait():
        running.set()
        threading.Event().wait()

    WORKERS.append(ThreadWorker())
    WORKERS[0].start(wait, torch.zeros(1))
    running.wait()


def test_a_blocked_job_does_not_keep_the_process_alive():
    (outcome,) = observe_ranks(1, block, time_limit=30)
    assert (outcome.error, outcome.exit_code) == (None, 0), outcome.log


def test_the_thread_ends_with_its_object():
    before = set(threading.enumerate())
    worker = ThreadWorker()
    (thread,) = set(threading.enumerate()) - before
    worker.start(partial(id, worker), torch.zeros(1)).wait()  # the job holds the object
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
