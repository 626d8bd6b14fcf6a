"""The first connection of a rank: to the store by which all ranks find each other."""

import os
import socket
import time

_OF_TORCHRUN = "give torchrun on the first host --local-addr, by which the others reach it"
_OF_RANK_0 = "set MASTER_ADDR to the host of rank 0, and MASTER_PORT to one port on all ranks"


def wait_for_store(seconds: float = 60.0) -> None:
    """Wait until $MASTER_PORT of $MASTER_ADDR, for ``init_process_group``, can be reached.

    A ConnectionError after some seconds says what to set; ``init_process_group`` alone waits for 30
    minutes with gloo, and names a variable that is not set. Rank 0 may host the store itself.
    """
    variables = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    rank, host, port = (os.environ.get(name, "") for name in variables)
    torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if "" in (rank, host, port) or (rank == "0" and not torchrun):
        return
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ConnectionError(
                    f"rank {rank} on {socket.gethostname()} cannot reach {host}:{port} of "
                    f"{'torchrun' if torchrun else 'rank 0'} after {seconds:g} s "
                    f"({error.strerror or error}): {_OF_TORCHRUN if torchrun else _OF_RANK_0}, and "
                    f"open the port between the hosts: `nc -vz {host} {port}` must succeed there"
                ) from error
        time.sleep(0.2)
