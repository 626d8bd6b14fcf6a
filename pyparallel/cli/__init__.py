"""The commands of ``python -m pyparallel``.

Each is a module with ``EXAMPLE``, a command line, ``add_arguments`` and ``report``.
"""

__all__ = ["doctor", "launch", "plan", "recommend", "shards", "simulate", "topology", "watch"]
