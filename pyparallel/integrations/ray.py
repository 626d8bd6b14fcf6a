"""Ray Train: workers that gossip, of which only one that dies is replaced."""

import os
from typing import Any

from typing_extensions import override

from ..gossip.membership import Lighthouse
from ..gossip.membership.lighthouse import ADDRESS, REPLICAS
from .versions import require_version

require_version("ray", "2.60")

from ray.train.backend import Backend, BackendConfig  # noqa: E402  after its version
from ray.train.torch import TorchConfig  # noqa: E402
from ray.util import get_node_ip_address  # noqa: E402

__all__ = ["ElasticConfig"]


class ElasticConfig(TorchConfig):  # type: ignore[misc]  # Ray may be absent
    """Lets each worker of Ray's ``TorchTrainer`` be a member of its own.

    It is the ``torch_config`` of a trainer whose function wraps its model with
    ``membership=Lighthouse()``, and starts the lighthouse beside Ray's controller. A worker that
    dies is replaced, as often as ``FailureConfig(max_failures=...)`` allows, and joins the others,
    which train on meanwhile. Nothing else initializes a process group. Ray must be 2.60 or newer.
    """

    @property
    @override
    def backend_cls(self) -> type[Backend]:
        return _ElasticBackend


class _ElasticBackend(Backend):  # type: ignore[misc]
    """Tells workers the address of the lighthouse; Ray makes one in the controller's process."""

    has_replica_groups = True  # of one worker each

    def __init__(self) -> None:
        self._server: Any = None

    @override
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Set the environment of new workers: all at the beginning, or one that replaces another.

        Those of the beginning wait for each other.
        """
        if self._server is None:
            self._server = Lighthouse.serve("0.0.0.0:0")
        port = self._server.address().rpartition(":")[2]
        address = f"http://{get_node_ip_address()}:{port}"
        variables = {ADDRESS: address, REPLICAS: str(len(worker_group))}
        worker_group.execute(_set_variables, variables)


def _set_variables(variables: dict[str, str]) -> None:
    """Set variables of the worker's environment: a method of os.environ would travel as a copy."""
    os.environ.update(variables)
