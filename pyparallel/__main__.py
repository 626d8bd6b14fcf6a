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
    doctor = commands.add_parser("doctor", help="what is installed, and what serves each op")
    doctor.set_defaults(run=lambda _: print(examine()))
    topology = commands.add_parser("topology", help="what a topology costs, and how fast it mixes")
    topology_report.add_arguments(topology)
    topology.set_defaults(run=lambda chosen: print(topology_report.report(chosen)))
    plan = commands.add_parser("plan", help="what every pipeline schedule costs, side by side")
    plan_report.add_arguments(plan)
    plan.set_defaults(run=lambda chosen: print(plan_report.report(chosen)))
    recommend = commands.add_parser("recommend", help="which compressor pays on a link, if any")
    recommend_report.add_arguments(recommend)
    recommend.set_defaults(run=lambda chosen: _print(recommend_report.report(chosen)))
    arguments = parser.parse_args()
    arguments.run(arguments)


def _print(text: str) -> None:
    """Nothing, where another rank speaks for all."""
    if text:
        print(text)


if __name__ == "__main__":
    main()
