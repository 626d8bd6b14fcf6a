"""The code blocks of the README and of the site, and how they are run.

A ``python`` block that begins with ``# name.py`` is a script, and runs on as many ranks as the
``torchrun`` that names it starts, or only as the ``pyparallel launch`` that names it does; so does
a file of ``examples`` that a page includes. It may import an earlier one. The others run one after
the other in one namespace, on one rank. A ``console`` block holds commands; one with ``--nnodes 2``
is started twice, on this machine. A ``text`` block is what the blocks before it print: words and
integers exactly, other numbers to within a fifth or one of the last digit shown. There are no other
blocks, except for Sphinx's directives.
"""

import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests.docs import stand_ins
from tests.launched import as_torchrun

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[!_]*/**/*.md"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^( *)(`{3,}|~{3,}|:{3,})(.*)\n((?:.*\n)*?)\1\2[ \t]*$", re.MULTILINE)
LANGUAGES = ("python", "console", "text")
DIRECTIVES = ("{toctree}", "{eval-rst}", "{note}", "{warning}", "{tip}")
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
FALLS = re.compile(r"(?:loss|disagreement|error) (\d[\d.e+-]*)")
RISES = re.compile(r"accuracy (\d[\d.]*)")
# Commands that the tests of the installation, the examples and the command line run, or that need a
# network.
NOT_RUN = ("pip", "make", "git", "cd", "python -m venv", "export", "sudo")
NOT_RUN += ("python -m pyparallel watch", "sbatch", "kubectl")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and its page and line."""

    language: str
    text: str
    place: str

    @property
    def script(self) -> str | None:
        """Return the name of the file that the block is."""
        match = re.match(r"# ([\w/]+\.py)\n", self.text)
        return match[1] if match and self.language == "python" else None

    @property
    def runnable(self) -> str:
        """Return the text; torchvision is loaded before the libraries that import it."""
        found = re.search(
            r"^(?:import|from) (accelerate|lightning|transformers)\b", self.text, re.MULTILINE
        )
        load = "from benchmarks.harness.libraries import load"
        return f"{load}; load({found[1]!r})\n{self.text}" if found else self.text

    @property
    def commands(self) -> list[str]:
        """Return the commands of a console block, without comments and line breaks."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.partition("  #")[0].strip() for line in lines if line and line[0] != "#"]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that are code, commands or what they print.

    Raises:
        ValueError: a block is something else, or has no end.
    """
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent, _fence, info, body = match.groups()
        language = info.split()[0] if info.strip() else ""
        line = text.count("\n", 0, match.start()) + 1
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        place = f"{page.relative_to(ROOT)}:{line}"
        if language == "{literalinclude}":
            path = (page.parent / info.split()[1]).resolve().relative_to(ROOT)
            language, body = "python", f"# {path}\n{(ROOT / path).read_text()}"
        if language not in LANGUAGES + DIRECTIVES:
            raise ValueError(
                f"{place} must be python, console or text, got {language or 'nothing'}"
            )
        found.append(Block(language, body, place))
    if left := re.search("```|~~~|:::", FENCE.sub("", text)):
        raise ValueError(f"{page.relative_to(ROOT)} has {left[0]} that does not fence a block")
    return [block for block in found if block.language in LANGUAGES]


def num_ranks_of(block: Block, blocks: list[Block]) -> int:
    """Return the number of ranks that a page's first torchrun of this script starts, else 1."""
    for command in (command for each in blocks if each.language == "console"
                    for command in each.commands):  # fmt: skip
        if command.startswith("torchrun") and block.script in command.split():
            return num_nodes_of(command) * int(_option("nproc-per-node", command))
    return 1


def is_launched(block: Block, blocks: list[Block]) -> bool:
    """Return whether a page's commands launch the script, whose membership makes its groups."""
    commands = [each for other in blocks if other.language == "console" for each in other.commands]
    return any("pyparallel launch" in each and block.script in each.split() for each in commands)


def num_nodes_of(command: str) -> int:
    """Return on how many machines a torchrun command must be started."""
    return int(_option("nnodes", command))


def _option(name: str, command: str) -> str:
    match = re.search(rf"--{name}[ =](\d+)", command)
    return match[1] if match else "1"


def run_page(rank: int, blocks: list[Block], folder: Path) -> list[str]:
    """Run the Python of a page that runs on as many ranks; return what each block prints."""
    os.chdir(folder)
    printed, names = [], {}
    in_folder = mock.patch.object(sys, "path", [str(folder), *sys.path])
    for block in blocks:
        if block.language != "python" or num_ranks_of(block, blocks) != dist.get_world_size():
            printed.append("")
            continue
        torch.manual_seed(rank)
        scope = {"__name__": "__main__"} if block.script else names
        with (
            in_folder,
            as_torchrun(rank),  # for hosts that look for it
            stand_ins.of_loggers(block.text),
            mock.patch.object(dist, "init_process_group"),  # the group of the test serves
            mock.patch.object(dist, "destroy_process_group"),
            contextlib.redirect_stdout(io.StringIO()) as output,
        ):
            exec(compile(block.runnable, block.place, "exec"), scope)
        printed.append(output.getvalue())
    return printed


def run_command(command: str, folder: Path, limit: float = 240) -> str:
    """Run a command of a console block, as often as it has nodes; return what it prints."""
    with socket.create_server(("localhost", 0)) as server:  # a free port
        address = f"localhost:{server.getsockname()[1]}"
    words = shlex.split(command.replace("$HOST:29500", address))
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def run(_: int) -> str:
        result = subprocess.run(
            words,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit,
            env=environment,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    with ThreadPoolExecutor() as pool:
        return "".join(pool.map(run, range(num_nodes_of(command))))


def assert_prints(shown: str, printed: str, place: str) -> None:
    """Compare what a page shows with what was printed: only floats may differ, and a little."""
    message = f"{place} shows\n{shown}\nbut its blocks print\n{printed}"
    lines, shown_lines = printed.split("\n"), shown.rstrip("\n").split("\n")
    lines = [line.rstrip() for line in lines if line.strip()]
    shown_lines = [line.rstrip() for line in shown_lines if line.strip()]
    if "..." in shown_lines:  # lines are left out
        shown_lines = [line for line in shown_lines if line != "..."]
        pattern = [NUMBER.sub("#", line) for line in shown_lines]
        lines = [line for line in lines if NUMBER.sub("#", line) in pattern][: len(shown_lines)]
    assert len(lines) == len(shown_lines), message
    for line, wanted in zip(lines, shown_lines, strict=True):
        assert _words(line) == _words(wanted), message
        for number, other in zip(NUMBER.findall(line), NUMBER.findall(wanted), strict=True):
            value, expected = (float(each.replace(",", "")) for each in (number, other))
            last_digit = 0.0 if "e" in other else 10.0 ** -len(other.partition(".")[2])
            allowed = max(0.2 * abs(expected), 1.01 * last_digit)
            is_integer = "." not in other and "e" not in other
            assert abs(value - expected) <= (0 if is_integer else allowed), message


def check_shown(blocks: list[Block], printed: list[str]) -> None:
    """Compare each text block with what the Python before it has printed since the last one.

    Where it printed nothing there must be commands in between, which the slow test runs.
    """
    since, commands = "", False
    for block, output in zip(blocks, printed, strict=True):
        since += output
        commands |= block.language == "console"
        if block.language == "text":
            assert since or commands, f"{block.place} shows what no block prints:\n{block.text}"
            if since:
                assert_prints(block.text, since, block.place)
            since, commands = "", False


def _words(line: str) -> str:
    return re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()


def assert_learned(printed: str, place: str) -> None:
    """A loss must fall by a fifth, or an accuracy rise by one."""
    losses, accuracies = (
        [float(each.rstrip(".")) for each in pattern.findall(printed)] for pattern in (FALLS, RISES)
    )
    learned = (losses and losses[-1] < 0.8 * losses[0]) or (
        accuracies and accuracies[-1] > 1.2 * accuracies[0]
    )
    assert learned, f"{place} must print a loss that falls or an accuracy that rises:\n{printed}"
