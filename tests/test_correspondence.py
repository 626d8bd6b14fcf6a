"""One op, one name, everywhere; and every public symbol says what it is."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pyparallel
from benchmarks.harness.libraries import load
from pyparallel import ops
from tests.planted_faults import FAULTS

ROOT = Path(__file__).resolve().parent.parent

EVERY_OP_HAS = [
    "csrc/{}.h",
    "csrc/cpu/{}.cpp",
    "csrc/cuda/{}.cu",
    "tests/ops/test_{}.py",
    "benchmarks/ops/bench_{}.py",
]
# These folders may have fewer names, never others.
ONLY_OPS_HAVE = [*EVERY_OP_HAS[1:], "kernels/triton/{}.py", "tests/kernels/test_{}.py"]

# The others run torch's ops on a GPU without nvcc.
ELEMENT_WISE = {"adamw_step", "mix", "predict_adam", "predict_sgd", "sgd_step"}


def find_names(pattern: str, root: Path = ROOT) -> set[str]:
    """What stands for {} in the names of files; private ones have no correspondents."""
    begin, end = Path(pattern).name.split("{}")
    names = {
        path.name.removeprefix(begin).removesuffix(end)
        for path in (root / pattern).parent.glob(f"{begin}*{end}")
    }
    return {name for name in names if not name.startswith("_")}


def find_ops(root: Path = ROOT) -> set[str]:
    return find_names("pyparallel/ops/{}.py", root)


def find_missing(root: Path = ROOT) -> list[str]:
    names = [pattern.format(op) for op in sorted(find_ops(root)) for pattern in EVERY_OP_HAS]
    return [name for name in names if not (root / name).exists()]


def find_strays(root: Path = ROOT) -> list[str]:
    return [
        pattern.format(name)
        for pattern in ONLY_OPS_HAVE
        for name in sorted(find_names(pattern, root) - find_ops(root))
    ]


def test_every_op_has_its_files():
    assert "mix" in find_ops()
    assert find_missing() == []


def test_no_file_is_named_after_what_is_no_op():
    assert find_strays() == []


def test_only_element_wise_ops_have_triton_kernels_which_are_inspected():
    for pattern in ONLY_OPS_HAVE[-2:]:
        assert find_names(pattern) == ELEMENT_WISE, pattern


def test_both_compilers_share_the_math_of_an_element():
    for folder in ("cpu", "cuda"):
        sources = [path for path in (ROOT / "csrc" / folder).iterdir() if path.suffix != ".h"]
        assert sources
        for path in sources:
            assert f'#include "{path.stem}.h"' in path.read_text(), path.name


def test_planted_faults_can_still_be_planted():
    texts = [(ROOT / each.path).read_text().count(each.text) for each in FAULTS]
    named = (name.partition("::")[0] for each in FAULTS for name in each.tests.split())
    assert [each.name for each, count in zip(FAULTS, texts, strict=True) if count != 1] == []
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_public_function_of_an_op_bears_its_name():
    assert set(ops.names()) <= set(ops.__all__)
    for name in ops.names():
        file = getattr(ops, name).__module__
        assert file.rpartition(".")[2] in find_ops(), name
        assert hasattr(importlib.import_module(file), f"{name.rstrip('_')}_reference"), name


def test_missing_and_stray_files_are_seen(tmp_path):
    for name in [
        "pyparallel/ops/a.py",
        "pyparallel/ops/_b.py",
        *(p.format("a") for p in EVERY_OP_HAS),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert (find_missing(tmp_path), find_strays(tmp_path)) == ([], [])
    (tmp_path / "csrc/a.h").unlink()
    (tmp_path / "csrc/cuda/c.cu").touch()
    (tmp_path / "benchmarks/ops/bench_gossip.py").touch()
    assert find_missing(tmp_path) == ["csrc/a.h"]
    assert find_strays(tmp_path) == ["csrc/cuda/c.cu", "benchmarks/ops/bench_gossip.py"]


def find_modules() -> list[ModuleType]:
    load("transformers")  # which hosts import, in an order that works beside a CPU torch
    names = [m.name for m in pkgutil.walk_packages(pyparallel.__path__, "pyparallel.")]
    public = [name for name in names if not re.search(r"\._", name)]
    if importlib.util.find_spec("ray") is None:  # too large to be a tool of development
        public.remove("pyparallel.integrations.ray")
    return [pyparallel, *(importlib.import_module(name) for name in public)]


def test_every_package_says_what_is_public():
    silent = [
        m.__name__
        for m in find_modules()
        if hasattr(m, "__path__") and not m.__dict__.get("__all__")
    ]
    assert silent == []


def is_undocumented(symbol: object) -> bool:
    """Of what can have a docstring of its own; a dataclass without one is given its signature."""
    if not (inspect.ismodule(symbol) or inspect.isclass(symbol) or inspect.isroutine(symbol)):
        return False
    text = symbol.__doc__ or ""
    return not text or text.startswith(f"{symbol.__name__}(")


def test_every_exported_symbol_has_a_docstring():
    exported = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in find_modules()
        for name in getattr(module, "__all__", [])
    }
    assert "pyparallel.ops.mix_" in exported
    assert [name for name, symbol in exported.items() if is_undocumented(symbol)] == []


def test_a_missing_docstring_of_an_exported_symbol_is_seen():
    @dataclass
    class Bare:
        x: int

    def documented():
        """Doc."""

    assert is_undocumented(Bare)
    assert is_undocumented(lambda: 0)
    assert not is_undocumented(documented)


def find_undocumented(path: Path) -> list[str]:
    """Public functions, classes and methods without a docstring in a file."""
    return [
        f"{path.name}:{node.lineno} {node.name}"
        for owner in ast.walk(ast.parse(path.read_text()))
        if isinstance(owner, ast.Module | ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not node.name.startswith("_") and ast.get_docstring(node) is None
        if "override" not in {ast.unparse(mark) for mark in node.decorator_list}
    ]


def test_private_modules_are_documented_too():
    # ruff asks for docstrings in public modules only, but what others import must say what it is.
    files = [*(ROOT / "pyparallel").rglob("_[!_]*.py"), *(ROOT / "kernels").rglob("_[!_]*.py")]
    assert {path.name for path in files} >= {"_checks.py", "_library.py", "_floats.py"}
    assert [name for path in files for name in find_undocumented(path)] == []


def test_missing_docstrings_are_seen(tmp_path):
    source = "def _a(): ...\nclass B:\n    '''Doc.'''\n    def c(self): ...\n    def _d(self): ..."
    (tmp_path / "_x.py").write_text(f"{source}\ndef e():\n    def inner(): ...\n")
    assert find_undocumented(tmp_path / "_x.py") == ["_x.py:6 e", "_x.py:4 c"]
