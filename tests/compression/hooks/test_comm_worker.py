import gc
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch

from pyparallel.compression.hooks.comm_worker import ThreadWorker


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


def test_a_future_raises_its_job_s_error():
    def fail():
        time.sleep(0.01)
        raise ValueError("no more paper")

    with pytest.raises(RuntimeError, match="no more paper"):
        ThreadWorker().start(fail, torch.zeros(1)).wait()


def test_jobs_run_after_a_failed_one():
    worker = ThreadWorker()

    def fail():
        raise ValueError("no more paper")

    failed = worker.start(fail, torch.zeros(1))
    assert worker.start(lambda: None, torch.ones(1)).wait() == 1
    with pytest.raises(RuntimeError, match="no more paper"):
        failed.wait()


def test_a_blocked_job_does_not_keep_the_process_alive():
    script = (
        "import threading, torch\n"
        "from pyparallel.compression.hooks.comm_worker import ThreadWorker\n"
        "worker, running = ThreadWorker(), threading.Event()\n"
        "def wait():\n"
        "    running.set()\n"
        "    threading.Event().wait()\n"
        "worker.start(wait, torch.zeros(1))\n"
        "running.wait()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_thread_ends_with_its_object():
    before = set(threading.enumerate())
    worker = ThreadWorker()
    (thread,) = set(threading.enumerate()) - before
    worker.start(partial(id, worker), torch.zeros(1)).wait()  # the job holds the object
    del worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
