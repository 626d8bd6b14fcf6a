"""The command line: ``python -m pyparallel doctor``, ``topology``, ``plan``, ``recommend``."""

import argparse
import importlib

# Each is a module of pyparallel.cli with `add_arguments` and `report`, imported when it is used.
_COMMANDS = {
    "doctor": "installed versions, and what runs each op",
    "topology": "the cost and mixing rate of a topology",
    "plan": "the costs of all pipeline schedules",
    "recommend": "which compressor is fastest on a link",
}


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(prog="python -m pyparallel")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in _COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    chosen, arguments = parser.parse_known_args()
    command = importlib.import_module(f"pyparallel.cli.{chosen.command}")
    options = argparse.ArgumentParser(
        prog=f"python -m pyparallel {chosen.command}", description=_COMMANDS[chosen.command]
    )
    command.add_arguments(options)
    text = command.report(options.parse_args(arguments))
    if text:  # empty on ranks other than 0
        print(text)


if __name__ == "__main__":
    main()
