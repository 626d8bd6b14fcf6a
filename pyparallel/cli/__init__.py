"""The commands of ``python -m pyparallel``: each a module with ``add_arguments`` and ``report``."""

__all__ = ["doctor", "plan", "recommend", "topology"]
