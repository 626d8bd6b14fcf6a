"""The command line: ``python -m pyparallel doctor``, ``topology``, ``plan``, ``shards``, ...."""

import argparse
import importlib

# Each is a module of pyparallel.cli with `EXAMPLE`, `add_arguments` and `report`, imported when it
# is used.
_COMMANDS = {
    "doctor": "installed versions, what runs each op, and what is missing",
    "topology": "the cost and mixing rate of topologies",
    "plan": "the costs of all pipeline schedules",
    "simulate": "time, waits and goodput of a run on any number of ranks",
    "recommend": "which compressor is fastest on a link",
    "launch": "a lighthouse, and a torchrun for each replica",
    "shards": "what a rank holds and sends of a sharded model",
    "watch": "the ranks of a run, as long as it lasts",
}


def main() -> None:
    """Parse the command line and run its command."""
    parser = argparse.ArgumentParser(
        prog="python -m pyparallel", epilog="example: python -m pyparallel topology --ranks 16"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND [-h]")
    for name, summary in _COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    chosen, arguments = parser.parse_known_args()
    if chosen.command is None:
        if arguments:
            parser.error(f"a command must come first, got {' '.join(arguments)}")
        parser.print_help()
        return
    command = importlib.import_module(f"pyparallel.cli.{chosen.command}")
    options = argparse.ArgumentParser(
        prog=f"python -m pyparallel {chosen.command}",
        description=_COMMANDS[chosen.command],
        epilog=f"example: {command.EXAMPLE}",
    )
    command.add_arguments(options)
    text = command.report(options.parse_args(arguments))
    if text:  # empty on ranks other than 0
        print(text)


if __name__ == "__main__":
    main()
