"""Leaving: so that no thread of a gloo group outlives the interpreter.

A gloo worker thread that drops a tensor must take Python's lock. If the interpreter is already
finalizing, the thread is unwound inside a ``noexcept`` function, and a run whose results are all
right ends with "terminate called without an active exception". The threads are joined when the
last reference to the group goes, so nothing may keep one beyond ``destroy_process_group()``, and
that last one must be Python's: C++ would wait for the threads with Python's lock in its hand.

* ``torch.distributed.nn`` takes ``group=dist.group.WORLD`` as default arguments. Imported after
  ``init_process_group`` (creating an optimizer is enough), its functions hold the group for good.
  Imported here, before any group exists, they hold None.
* DistributedDataParallel holds the group in C++ too: ``AllReduceSession.close`` says in which
  order it lets go.
* Who never calls ``destroy_process_group()`` has it called at exit.
"""

import atexit
import gc
import importlib

import torch.distributed as dist

importlib.import_module("torch.distributed.nn.functional")  # before any group exists: see above


@atexit.register
def _leave_gloo() -> None:
    gc.collect()
    # A group without gloo leaves by itself; destroying it here could wait for a rank that died.
    if dist.is_initialized() and "gloo" in dist.get_backend_config():
        dist.destroy_process_group()
