"""The floors of the package: no import runs upward, trainers are strangers, nothing is circular."""

import ast
import collections
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.house import find_modules_of_one_trainer, parse

ROOT = Path(__file__).resolve().parent.parent

# From the ground up; what is not written yet has its floor waiting. "pyparallel" is __init__.py.
TRAINERS = {"gossip", "pipeline", "subnets"}
FLOORS = [
    {"kernels"},
    {"ops"},
    {"comm"},
    {"training"},
    {"compression", "optim"},
    TRAINERS | {"sequence"},
    {"integrations"},
    {"planning"},
    {"cli"},
    {"pyparallel", "__main__"},
]
# Within a folder, likewise. OWN is what lies in the folder itself; its __init__.py is above all.
OWN = "."
SUB_FLOORS = {
    "compression": [{OWN}, {"quantizers", "sparsifiers"}, {"low_rank"}, {"wrappers"}, {"hooks"}],
    "gossip": [{"topology"}, {"messages"}, {"push_sum"}, {"algorithms"}, {"membership"}, {OWN}],
    "integrations": [{OWN}, {"lightning"}],
    "pipeline": [
        {"prediction"},
        {"schedules"},
        {"messages"},
        {"runtime"},
        {"partition"},
        {"interlocking"},
        {OWN},
    ],
    "planning": [{"pipelines", "simulate"}, {"recommend"}],
    "subnets": [{"partition"}, {OWN}],
}
WIDEST = 25
KERNELS_MAY_IMPORT = {"torch", "triton", "numpy", *sys.stdlib_module_names}


def find_modules(root: Path) -> dict[str, Path]:
    """Dotted name to file; kernels/triton/ is pyparallel.kernels, as setup.py installs it."""
    names = {}
    for folder, prefix in [("pyparallel", []), ("kernels/triton", ["pyparallel", "kernels"])]:
        base = root / folder if prefix else root
        for path in (root / folder).rglob("*.py"):
            parts = [*prefix, *path.relative_to(base).with_suffix("").parts]
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def find_imports(module: str, path: Path) -> Iterator[str]:
    """Absolute dotted names, wherever in the file the import hides; `from a import b` is a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            separator = "." if node.module else ""
            for alias in node.names:
                yield absolute(base + separator + alias.name, package)
        elif name := dynamically_imported(node):
            yield absolute(name, package)


def dynamically_imported(node: ast.AST) -> str | None:
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return None
    called = ast.unparse(node.func).rpartition(".")[2]
    return node.args[0].value if called in {"import_module", "__import__"} else None


def absolute(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    parents = package.split(".")
    return ".".join([*parents[: len(parents) - level + 1], name[level:]])


def build_graph(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Which module imports which, within the package."""
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        targets = {resolve(name, modules) for name in find_imports(module, path)}
        graph[module] = targets - {None, module}
    return graph


def resolve(name: str, modules: dict[str, Path]) -> str | None:
    """The longest beginning of the name that is a module of ours: the rest are names in it."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def floor(module: str) -> int:
    floors = [index for index, rooms in enumerate(FLOORS) if room(module) in rooms]
    assert floors, f"{module} has no floor: decide where it belongs, and write it into FLOORS"
    return floors[0]


def sub_room(module: str, modules: dict[str, Path]) -> str:
    """The folder of a module inside its room; OWN for what lies in the room itself."""
    parts = module.split(".")
    inside = len(parts) > 3 or modules[module].name == "__init__.py"
    return parts[2] if inside and len(parts) > 2 else OWN


def sub_floor(module: str, modules: dict[str, Path]) -> int:
    floors = SUB_FLOORS.get(room(module), [])
    if modules[module].name == "__init__.py" and module.count(".") == 1:
        return len(floors)  # the room's __init__.py collects what all its folders have
    folder = sub_room(module, modules)
    if not floors:
        assert folder == OWN, f"{module}: write the folders of {room(module)} into SUB_FLOORS"
        return 0
    found = [index for index, folders in enumerate(floors) if folder in folders]
    assert found, f"{module} has no floor: write {folder} into SUB_FLOORS of {room(module)}"
    return found[0]


def find_violations(root: Path) -> list[str]:
    modules = find_modules(root)
    found = []
    for module, targets in sorted(build_graph(modules).items()):
        height, sub_height = floor(module), sub_floor(module, modules)
        for target in sorted(targets):
            if floor(target) > height:
                found.append(f"{module} imports {target}, which lies above it")
            elif room(target) != room(module):
                if {room(target), room(module)} <= TRAINERS:
                    found.append(f"{module} imports {target}: trainers must not know each other")
            elif sub_floor(target, modules) > sub_height:
                found.append(f"{module} imports {target}, which lies above it")
            elif sub_floor(target, modules) == sub_height and (
                sub_room(target, modules) != sub_room(module, modules)
            ):
                found.append(f"{module} imports {target}: folders of one floor are strangers")
    return found


def find_lone_users(root: Path) -> list[str]:
    """Return the modules of comm and training that serve one trainer's package alone."""
    found = find_modules_of_one_trainer(root).items()
    return [f"{module} serves {trainer} alone: move it there" for module, trainer in sorted(found)]


def find_circle(root: Path) -> list[str]:
    try:
        graphlib.TopologicalSorter(build_graph(find_modules(root))).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def find_strangers(root: Path) -> list[str]:
    """What kernels/ imports and must not, so that a kernel runs wherever Triton and torch do."""
    found = []
    for module, path in sorted(find_modules(root).items()):
        if room(module) != "kernels":
            continue
        for name in find_imports(module, path):
            ours = (resolve(name, find_modules(root)) or "").startswith("pyparallel.kernels")
            if not ours and name.split(".")[0] not in KERNELS_MAY_IMPORT:
                found.append(f"{module} imports {name}")
    return found


def test_no_import_runs_upward_or_between_trainers():
    assert {"pyparallel", "pyparallel.ops.mix", "pyparallel.kernels.mix"} <= set(find_modules(ROOT))
    assert find_violations(ROOT) == []


def test_nothing_that_is_shared_serves_one_trainer_alone(tmp_path):
    assert find_lone_users(ROOT) == []
    sources = {
        "pyparallel/comm/__init__.py": "from .x import a",
        "pyparallel/comm/x.py": "from .y import b\na = 1",
        "pyparallel/comm/y.py": "b = 1",
        "pyparallel/gossip/u.py": "from ..comm import a",
    }
    tree = write_tree(tmp_path, sources)
    lone = [f"pyparallel.comm.{name} serves gossip alone: move it there" for name in "xy"]
    assert find_lone_users(tree) == lone
    (tree / "pyparallel/subnets/u.py").write_text("from ..comm import y")
    assert find_lone_users(tree) == lone[:1]


def test_no_circle_between_files():
    assert find_circle(ROOT) == []


def test_kernels_import_only_what_a_kernel_needs():
    assert find_strangers(ROOT) == []


def test_the_graph_is_that_of_this_package():
    graph = build_graph(find_modules(ROOT))
    assert "pyparallel.gossip" in graph["pyparallel"]
    assert "pyparallel.ops._library" in graph["pyparallel.ops.mix"]
    assert "pyparallel.kernels" in graph["pyparallel.ops._library"]  # the one dynamic import
    assert "pyparallel.kernels._register" in graph["pyparallel.kernels.mix"]


def write_tree(root: Path, sources: dict[str, str]) -> Path:
    folders = ["gossip/topology", "pipeline/runtime", "pipeline/partition"]
    folders += ["planning", "planning/pipelines", "planning/simulate"]
    rooms = ["", "comm", "ops", "integrations", *TRAINERS, *folders]
    packages = ["kernels/triton", *(f"pyparallel/{room}" for room in rooms)]
    for package in packages:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").touch()
    for name, source in sources.items():
        (root / name).write_text(source)
    return root


ABOVE = "pyparallel.gossip, which lies above it"
CAUGHT = [  # a file, its source, and what it must not import
    *(
        ("ops/x.py", source, ABOVE)
        for source in (
            "from pyparallel.gossip import SGP",
            "import pyparallel.gossip as gossip",
            "from .. import gossip",
            "from ..gossip import SGP",
            "def f():\n    from ..gossip import SGP",
            "class A:\n    def f(self):\n        import pyparallel.gossip",
            "if TYPE_CHECKING:\n    from ..gossip import SGP",
            "try:\n    from ..gossip import SGP\nexcept ImportError:\n    pass",
            "import importlib\nimportlib.import_module('pyparallel.gossip')",
            "from importlib import import_module\nimport_module('..gossip', 'pyparallel.ops')",
        )
    ),
    ("ops/x.py", "from pyparallel import SGP", "pyparallel, which lies above it"),
    *(
        ("gossip/x.py", f"from ..{there} import y",
         f"pyparallel.{there}: trainers must not know each other")
        for there in ("pipeline", "subnets")
    ),
    *(
        ("pipeline/runtime/x.py", source, f"pyparallel.pipeline{where}, which lies above it")
        for source, where in [
            ("from ..partition import y", ".partition"),
            ("from ... import pipeline", ""),
            ("from ..trainer import y", ".trainer"),
        ]
    ),
    *(
        (f"{room}/x.py", "from ..planning import simulate",
         "pyparallel.planning.simulate, which lies above it")
        for room in ("integrations", *sorted(TRAINERS))
    ),
    ("planning/pipelines/x.py", "from ..simulate import y",
     "pyparallel.planning.simulate: folders of one floor are strangers"),
]  # fmt: skip


def test_an_import_that_runs_upward_or_between_strangers_is_caught_wherever_it_hides(tmp_path):
    tree = write_tree(tmp_path, {"pyparallel/pipeline/trainer.py": ""})
    for name, source, sentence in CAUGHT:
        path = tree / "pyparallel" / name
        path.write_text(source)
        module = f"pyparallel.{name.removesuffix('.py').replace('/', '.')}"
        assert find_violations(tree) == [f"{module} imports {sentence}"], source
        path.unlink()


def find_wide_folders(root: Path) -> dict[str, int]:
    """Folders of Python that hold more files than one reads at a glance."""
    files = [p for top in ["pyparallel", "benchmarks", "tests"] for p in (root / top).rglob("*.py")]
    widths = collections.Counter(str(path.parent.relative_to(root)) for path in files)
    return {folder: width for folder, width in widths.items() if width > WIDEST}


def test_no_folder_is_wide(tmp_path):
    assert find_wide_folders(ROOT) == {}
    (tmp_path / "tests/a").mkdir(parents=True)
    for number in range(WIDEST + 1):
        (tmp_path / f"tests/a/test_{number}.py").touch()
    assert find_wide_folders(tmp_path) == {"tests/a": WIDEST + 1}


def find_forgotten_packages(root: Path) -> set[str]:
    """Folders with Python files that an install would leave out; an editable one hides them."""
    folders = {path.parent.relative_to(root) for path in (root / "pyparallel").rglob("*.py")}
    return {".".join(folder.parts) for folder in folders} - set(find_packages(root))


def test_setuptools_finds_every_folder(tmp_path):
    assert find_forgotten_packages(ROOT) == set()
    tree = write_tree(tmp_path, {})
    (tree / "pyparallel/gossip/new").mkdir()
    (tree / "pyparallel/gossip/new/x.py").touch()
    assert find_forgotten_packages(tree) == {"pyparallel.gossip.new"}


def test_downward_imports_are_allowed(tmp_path):
    sources = {
        "pyparallel/gossip/x.py": "from ..ops import mix_\nfrom .topology import y\nimport torch",
        "pyparallel/planning/pipelines/x.py": "from ...pipeline import y\nfrom .z import y",
        "pyparallel/pipeline/trainer.py": "from .runtime import x",
        "pyparallel/pipeline/__init__.py": "from .trainer import x",
    }
    tree = write_tree(tmp_path, sources)
    assert find_violations(tree) == []
    assert find_circle(tree) == []


def test_a_circle_is_caught_even_if_one_import_is_inside_a_function(tmp_path):
    x, y, z = "from .y import a", "from . import z", "def f():\n    from .x import b"
    folder = "pyparallel/gossip"
    tree = write_tree(tmp_path, {f"{folder}/x.py": x, f"{folder}/y.py": y, f"{folder}/z.py": z})
    assert find_violations(tree) == []
    assert set(find_circle(tree)) == {f"pyparallel.gossip.{name}" for name in "xyz"}


def test_a_circle_through_the_folder_itself_is_caught(tmp_path):
    init, x = "from .x import a", "from . import a"
    tree = write_tree(tmp_path, {"pyparallel/ops/__init__.py": init, "pyparallel/ops/x.py": x})
    assert set(find_circle(tree)) == {"pyparallel.ops", "pyparallel.ops.x"}


def test_a_kernel_that_imports_more_is_caught(tmp_path):
    path = write_tree(tmp_path, {}) / "kernels/triton/x.py"
    for source in ("import networkx", "from ..ops import mix_", "import kernels"):
        path.write_text(f"import torch, triton, math\n{source}")
        assert len(find_strangers(tmp_path)) == 1, source


def test_a_folder_without_a_floor_is_caught(tmp_path):
    with pytest.raises(AssertionError, match=r"pyparallel\.misc has no floor"):
        find_violations(write_tree(tmp_path, {"pyparallel/misc.py": ""}))


UNPICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def find_unpickling(source: str) -> list[str]:
    """What may run code that another rank or a file holds: objects of Python instead of JSON."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.split(".")[0] in UNPICKLING]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLING:
            found.append(node.module)
        elif isinstance(node, ast.ImportFrom):
            found += [each.name for each in node.names if is_of_objects(each.name)]
        elif isinstance(node, ast.Attribute) and is_of_objects(node.attr):
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {each.arg: ast.unparse(each.value) for each in node.keywords}
            safe = options.get("weights_only", "True") == "True"
            if not safe or options.get("allow_pickle", "False") != "False":
                found.append(name)
    return found


def is_of_objects(name: str) -> bool:
    """Return whether a collective of torch.distributed, by its name, sends objects as pickles."""
    return name.endswith(("_object", "_object_list")) and name.startswith(
        ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    )


def test_nothing_that_ranks_send_or_files_hold_is_unpickled():
    for module, path in find_modules(ROOT).items():
        assert find_unpickling(path.read_text()) == [], module
    for source in (
        "import pickle",
        "from pickle import loads",
        "import torch, marshal",
        "dist.all_gather_object(found, own)",
        "from torch.distributed import broadcast_object_list",
        "gather = torch.distributed.gather_object",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=is_safe)",
        "numpy.load(path, allow_pickle=True)",
    ):
        assert find_unpickling(source), source
    assert find_unpickling("torch.load(path, weights_only=True)") == []
