"""Counts of what the package holds, beside the goals of its refactoring.

``python -m tests.house [ROOT]`` prints the table for this checkout, or for the one at ROOT. All is
read from the text and the syntax trees of the files; nothing of the package is imported. Each
measure is a function of the root of a checkout; ``LIMITS`` is what ``test_house.py`` allows today.
The last rows are of this checkout alone, traced while it trains: see ``hops.py``.
"""

import argparse
import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pyparallel"
TRAINERS = {"gossip", "pipeline", "subnets"}
SHARED = ("comm", "training")  # below the trainers, for what more than one of them needs
SOURCES = {".py", ".cpp", ".cu", ".h", ".md"}
CHECK = re.compile(r"_?(check|validate)(_\w+)?|\w*(validation_error|error_at)|_?find_(\w+_)?error")
COPIED = {"counts", "step", "place", "rank", "trainer"}
OF_A_STATE = re.compile(r"(\S+ )?state\b")
LONG = 300
KINDS = ("gossip/algorithms/", "pipeline/schedules/", "compression/")

parse = functools.cache(ast.parse)


def find_files(root: Path) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


def find_nodes(root: Path, *kinds: type) -> Iterator[tuple[Path, Any]]:
    """All nodes of some kinds, each with its file."""
    for path in find_files(root):
        for node in ast.walk(parse(path.read_text())):
            if isinstance(node, kinds):
                yield path, node


def count_lines(root: Path, folder: str) -> int:
    """Lines of a folder's sources, blank ones and docstrings included."""
    paths = [path for path in (root / folder).rglob("*") if path.suffix in SOURCES]
    return sum(len(path.read_text().splitlines()) for path in paths)


def count_check_lines(root: Path) -> int:
    """Lines of raises, of ifs that do nothing else, and of functions whose name says check.

    Such a name is ``check``, ``validate``, ``error_at`` or ``find_error``, with a word more or
    without. A line counts once; an ``else`` does not belong to the check.
    """
    lines = set()
    for path, node in find_nodes(root, ast.Raise, ast.If, ast.FunctionDef):
        last = node
        if isinstance(node, ast.If):
            last = node.body[-1]
            if len(node.body) > 1 or not isinstance(last, ast.Raise):
                continue
        elif isinstance(node, ast.FunctionDef) and not CHECK.fullmatch(node.name):
            continue
        lines |= {(path, number) for number in range(node.lineno, last.end_lineno + 1)}
    return len(lines)


def count_exports(root: Path) -> int:
    """Names in ``__all__`` of ``comm``."""
    path = root / PACKAGE / "comm/__init__.py"
    for node in parse(path.read_text()).body if path.exists() else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def find_modules(root: Path) -> dict[str, Path]:
    modules = {}
    for path in find_files(root):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_imports(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """Pairs of an absolute module and a name imported from it; ``import a`` has no name."""
    for node in ast.walk(parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [*module.split("."), ""] if path.name == "__init__.py" else module.split(".")
            parents = parts[: -node.level] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from ((base, alias.name) for alias in node.names)


def find_defining_module(base: str, name: str, modules: dict[str, Path]) -> str:
    """The module that an imported name comes from, through the ``__init__.py`` of folders."""
    if f"{base}.{name}" in modules:
        return f"{base}.{name}"
    if base in modules and modules[base].name == "__init__.py":
        for other, imported in find_imports(base, modules[base]):
            if imported == name and other != base:
                return find_defining_module(other, name, modules)
    return base


def find_modules_of_one_trainer(root: Path) -> dict[str, str]:
    """Modules of ``comm`` and ``training`` that one trainer's package alone uses, with its name.

    What a module of the two folders uses, the users of that module use too. An ``__init__.py`` only
    collects names: it is neither a user nor measured.
    """
    modules = find_modules(root)
    package_of = {module: f"{module}.".split(".")[1] for module in modules}
    users: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        if path.name != "__init__.py" or package_of[module] not in {"", *SHARED}:
            for base, name in find_imports(module, path):
                users.get(find_defining_module(base, name, modules), set()).add(module)
    found = {}
    for module, path in modules.items():
        if package_of[module] in SHARED and path.name != "__init__.py":
            reached, pending = {module}, [module]
            while pending:
                new = users[pending.pop()] - reached
                reached |= new
                pending += [user for user in new if package_of[user] in SHARED]
            packages = {package_of[user] for user in reached} - set(SHARED)
            if len(packages) == 1 and packages <= TRAINERS:
                found[module] = packages.pop()
    return found


def count_lines_of_one_trainer(root: Path) -> int:
    modules, found = find_modules(root), find_modules_of_one_trainer(root)
    return sum(len(modules[module].read_text().splitlines()) for module in found)


def is_of_another_object(node: ast.AST) -> bool:
    """Whether a node sets ``x.y`` where x is neither self nor cls, in whatever statement."""
    if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})


def count_attributes_set(root: Path) -> int:
    return sum(is_of_another_object(node) for _, node in find_nodes(root, ast.Attribute))


def find_copies(root: Path) -> list[tuple[Path, str]]:
    """Assignments of a step, counts, place, rank or trainer onto another object.

    A compressor's state counts its own messages in ``state.step``: what starts with the name
    ``state``, on either side, is no copy.
    """
    found = []
    for path, node in find_nodes(root, ast.Assign, ast.AugAssign, ast.AnnAssign):
        value = ast.unparse(node.value) if node.value else ""
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            texts = map(ast.unparse, filter(is_of_another_object, ast.walk(target)))
            copies = [text for text in texts if text.rpartition(".")[2] in COPIED]
            found += [(path, text) for text in copies if not OF_A_STATE.match(f"{text} {value}")]
    return found


def count_long_classes(root: Path) -> int:
    classes = find_nodes(root, ast.ClassDef)
    return sum(node.end_lineno - node.lineno + 1 > LONG for _, node in classes)


def count_long_files(root: Path) -> int:
    return sum(len(path.read_text().splitlines()) >= LONG for path in find_files(root))


def count_averager_members(root: Path) -> int:
    """Public methods, properties and class attributes of ``ModelAverager``, inherited ones too.

    Base classes outside the package do not count, nor does an ``@override`` of theirs.
    """
    classes = {node.name: node for _, node in find_nodes(root, ast.ClassDef)}
    members, pending = set(), ["ModelAverager"]
    while pending:
        node = classes.pop(pending.pop(), ast.parse("class _: ...").body[0])
        pending += [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for each in node.body:
            if not isinstance(each, ast.FunctionDef):
                stored = [name for name in ast.walk(each) if isinstance(name, ast.Name)]
                members |= {name.id for name in stored if isinstance(name.ctx, ast.Store)}
            elif "override" not in map(ast.unparse, each.decorator_list):
                members.add(each.name)
    return sum(not name.startswith("_") for name in members)


def count_forwarding_methods(root: Path) -> int:
    """Functions whose one statement uses the method or property of the same name of an object.

    Calls of ``super()`` add a class's own arguments and do not count.
    """
    found = 0
    for _, node in find_nodes(root, ast.FunctionDef):
        body = node.body[ast.get_docstring(node) is not None :]
        if len(body) == 1 and isinstance(body[0], ast.Return | ast.Expr):
            used = body[0].value
            used = used.func if isinstance(used, ast.Call) else used
            if isinstance(used, ast.Attribute) and used.attr == node.name:
                found += ast.unparse(used.value) != "super()"
    return found


def count_written_rounds(root: Path) -> int:
    """Files of ``gossip`` that write headers ``of_round`` and ``start`` transfers themselves."""
    calls: dict[Path, set[str]] = {}
    for path, node in find_nodes(root, ast.Call):
        if root / PACKAGE / "gossip" in path.parents:
            called = ast.unparse(node.func).rpartition(".")
            calls.setdefault(path, set()).add("".join(called[1:]))
    writes = [".of_round" in each and each & {".start", "Transfer"} for each in calls.values()]
    return sum(map(bool, writes))


def find_kinds(root: Path) -> dict[str, str]:
    """Classes of algorithms, schedules and compressors, with the folder that holds their kind."""
    kinds: dict[str, str] = {}
    for path, node in find_nodes(root, ast.ClassDef):
        place = path.relative_to(root / PACKAGE).as_posix()
        kinds |= dict.fromkeys([node.name] if place.startswith(KINDS) else [], place)
    return {name: next(filter(place.startswith, KINDS)) for name, place in kinds.items()}


def count_class_tests(root: Path) -> int:
    """``isinstance`` of an algorithm, a schedule or a compressor outside the folder of its kind."""
    kinds, found = find_kinds(root), 0
    for path, node in find_nodes(root, ast.Call):
        if ast.unparse(node.func) == "isinstance":
            place = path.relative_to(root / PACKAGE).as_posix()
            names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            of = {kinds[name] for name in names & kinds.keys()}
            found += any(not place.startswith(each) for each in of)
    return found


def count_error_hooks(root: Path) -> int:
    """Public methods named ``*_error`` or ``error_*`` of algorithms, schedules and compressors."""
    found = 0
    for path, node in find_nodes(root, ast.ClassDef):
        if path.relative_to(root / PACKAGE).as_posix().startswith(KINDS):
            names = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found += sum(bool(re.fullmatch(r"[a-z]\w*_error|error_\w+", name)) for name in names)
    return found


def count_wide_functions(root: Path) -> int:
    """Functions of more than 12 arguments; those of ``ops`` are the kernels'."""
    found = 0
    for path, node in find_nodes(root, ast.FunctionDef):
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        names = {each.arg for each in arguments} - {"self", "cls"}
        found += len(names) > 12 and path.relative_to(root / PACKAGE).parts[0] != "ops"
    return found


# Each measure, and its goal; None: for information.
MEASURES: dict[str, tuple[Callable[[Path], int], int | None]] = {
    "lines of the package": (lambda root: count_lines(root, PACKAGE), 41_000),
    "lines of its checks and raises": (count_check_lines, 2_700),
    "lines of comm": (lambda root: count_lines(root, f"{PACKAGE}/comm"), 1_700),
    "exports of comm": (count_exports, 25),
    "lines of comm and training that one trainer uses": (count_lines_of_one_trainer, 0),
    "steps, counts and places copied onto another object": (lambda root: len(find_copies(root)), 0),
    "files with such copies": (lambda root: len({path for path, _ in find_copies(root)}), 0),
    "attributes set on another object": (count_attributes_set, 60),
    "classes above 300 lines": (count_long_classes, 2),
    "files of 300 lines and more": (count_long_files, 10),
    "members of ModelAverager": (count_averager_members, 16),
    "methods that only forward": (count_forwarding_methods, 35),
    "files that write a gossip round out": (count_written_rounds, 1),
    "isinstance of algorithms, schedules, compressors": (count_class_tests, 15),
    "methods of theirs that return an error": (count_error_hooks, 12),
    "functions of more than 12 arguments": (count_wide_functions, 0),
    "lines of tests": (lambda root: count_lines(root, "tests"), None),
    "lines of tests/golden": (lambda root: count_lines(root, "tests/golden"), None),
    "lines of benchmarks": (lambda root: count_lines(root, "benchmarks"), None),
}
TRACED: dict[str, int] = {  # goals of what ``hops.py`` counts, in half a minute
    "functions that a gossip bucket passes": 32,
    "functions that a microbatch passes": 38,
    "functions that a DDP bucket passes": 26,
    "objects with state in an SGP step": 11,
}
# What the tree may hold today: a change lowers a number on the way to its goal. Only a feature of
# its own, such as a new algorithm, or a fault that was mended, may raise the lines, by its own. The
# length of a file is counted, without a limit: short files made layers.
LIMITS = {
    "lines of the package": 45_776,
    "lines of its checks and raises": 3_116,
    "lines of comm": 2_121,  # of which p2p.py was in gossip and sequence
    "exports of comm": 25,
    "lines of comm and training that one trainer uses": 0,
    "steps, counts and places copied onto another object": 0,
    "files with such copies": 0,
    "attributes set on another object": 58,
    "classes above 300 lines": 2,
    "members of ModelAverager": 17,
    "methods that only forward": 28,
    "files that write a gossip round out": 1,
    "isinstance of algorithms, schedules, compressors": 11,
    "methods of theirs that return an error": 12,
    "functions of more than 12 arguments": 1,
    "functions that a gossip bucket passes": 34,
    "functions that a microbatch passes": 53,
    "functions that a DDP bucket passes": 56,
    "objects with state in an SGP step": 13,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", default=ROOT, help="of another checkout")
    root = parser.parse_args().root.resolve()
    width = max(map(len, MEASURES))
    print(f"{'measure':<{width}}  {'value':>7}  {'goal':>7}")
    for name, (count, goal) in MEASURES.items():
        print(f"{name:<{width}}  {count(root):>7,}  {'' if goal is None else f'{goal:,}':>7}")
    if root == ROOT:
        from tests import hops  # it imports torch

        traced = hops.count({value: hops.trace(value) for value in hops.WAYS})
        for name, goal in TRACED.items():
            print(f"{name:<{width}}  {traced[name]:>7,}  {goal:>7,}")


if __name__ == "__main__":
    main()
