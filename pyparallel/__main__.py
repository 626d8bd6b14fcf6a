"""The command line: ``python -m pyparallel doctor``, ``topology``, ``plan``, ``recommend``."""

import argparse

from .cli import plan as plan_report
from .cli import recommend as recommend_report
from .cli import topology as topology_report
from .cli.doctor import examine


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(prog="python -m pyparallel")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="installed versions, and what runs each op")
    doctor.set_defaults(run=lambda _: print(examine()))
    topology = commands.add_parser("topology", help="the cost and mixing rate of a topology")
    topology_report.add_arguments(topology)
    topology.set_defaults(run=lambda chosen: print(topology_report.report(chosen)))
    plan = commands.add_parser("plan", help="the costs of all pipeline schedules")
    plan_report.add_arguments(plan)
    plan.set_defaults(run=lambda chosen: print(plan_report.report(chosen)))
    recommend = commands.add_parser("recommend", help="which compressor is fastest on a link")
    recommend_report.add_arguments(recommend)
    recommend.set_defaults(run=lambda chosen: _print(recommend_report.report(chosen)))
    arguments = parser.parse_args()
    arguments.run(arguments)


def _print(text: str) -> None:
    """Print the text, which is empty on ranks other than 0."""
    if text:
        print(text)


if __name__ == "__main__":
    main()
