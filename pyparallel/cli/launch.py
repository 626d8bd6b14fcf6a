"""``python -m pyparallel launch``: a lighthouse, and a torchrun for each replica."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ..gossip.membership import Lighthouse
from ..gossip.membership.lighthouse import ADDRESS, HEARTBEAT_TIMEOUT, REPLICA, REPLICAS

EXAMPLE = "python -m pyparallel launch --replicas 4 train.py --lr 0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--replicas", type=int, default=2, help="processes that train (default: 2)")
    parser.add_argument(
        "--max-restarts", type=int, default=3, help="of each, by its torchrun (default: 3)"
    )
    parser.add_argument(
        "--bind", default="127.0.0.1:0", help="of the lighthouse (default: 127.0.0.1:0)"
    )
    parser.add_argument(
        "--print", action="store_true", help="print the commands for several machines, and end"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="and its arguments")


def report(arguments: argparse.Namespace) -> str:
    """Run all replicas until they end; return how each has. An exit status of 1 if one failed."""
    if arguments.replicas < 1:
        raise SystemExit(f"launch: --replicas must be at least 1, got {arguments.replicas}")
    if not arguments.script:
        raise SystemExit(f"launch: a script must come last, got none; {EXAMPLE}")
    torchrun = [
        "torchrun", "--nnodes", "1", "--nproc-per-node", "1", "--standalone",
        "--max-restarts", str(arguments.max_restarts), *arguments.script,
    ]  # fmt: skip
    if arguments.print:
        return _describe(torchrun, arguments.replicas)
    server: Any = Lighthouse.serve(arguments.bind)
    host = arguments.bind.rpartition(":")[0]
    port = server.address().rpartition(":")[2]
    environment = os.environ | {
        ADDRESS: f"http://{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{port}",
        REPLICAS: str(arguments.replicas),
    }
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun[1:]]
    replicas = [
        subprocess.Popen(command, env=environment | {REPLICA: f"replica-{index}"})
        for index in range(arguments.replicas)
    ]
    codes = _wait(replicas)
    server.shutdown()
    rows = [f"replica-{index}: exit status {code}" for index, code in enumerate(codes)]
    if any(codes):
        raise SystemExit("\n".join(["launch: not all replicas ended well", *rows]))
    return "\n".join(rows)


def _wait(replicas: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    """Wait for processes, and pass a SIGTERM on to them; return their exit statuses."""

    def terminate(*_: object) -> None:
        for replica in replicas:
            replica.terminate()

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return [each.wait() for each in replicas]
    except KeyboardInterrupt:  # which they have got too
        return [each.wait() for each in replicas]
    finally:
        signal.signal(signal.SIGTERM, before)


def _describe(torchrun: Sequence[str], replicas: int) -> str:
    lighthouse = (
        "torchft_lighthouse --min_replicas 1 --join_timeout_ms 600000 "
        f"--heartbeat_timeout_ms {round(1000 * HEARTBEAT_TIMEOUT)}"
    )
    return "\n".join(
        [
            "on a machine that stays, $HOST:",
            f"  {lighthouse}",
            f"for each of {replicas} replicas, anywhere, with another name each:",
            f"  {ADDRESS}=http://$HOST:29510 {REPLICAS}={replicas} {REPLICA}=replica-0 \\",
            f"    {shlex.join(torchrun)}",
        ]
    )
