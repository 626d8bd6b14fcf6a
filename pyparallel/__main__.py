"""The command line: ``python -m pyparallel doctor``."""

import argparse

from .doctor import examine


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(prog="python -m pyparallel")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, and what serves each op")
    doctor.set_defaults(run=lambda _: print(examine()))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
