"""Say what is wrong with a text in code style: a name, a keyword or a path that does not exist.

Checked are names that begin with a capital letter and what follows them (``GPipe.actions()``),
functions whose name has an underscore, keywords of calls, commands, and files of the repository.
Known are the public names of pyparallel, those of the modules below, Python's builtins, and
what the page's own code defines.
"""

import ast
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

from inventories import exists
from public_names import PACKAGES, import_package, public_names

ROOT = Path(__file__).resolve().parents[2]
ALIASES = {"pyparallel": "pyparallel", "torch": "torch", "nn": "torch.nn"}
ALIASES |= {"dist": "torch.distributed", "ops": "pyparallel.ops"}
NAMESPACES = {package.rpartition(".")[2]: package for package in PACKAGES} | ALIASES
MODULES = (
    *PACKAGES,
    "builtins",
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.parallel",
    "torch.optim",
    "torch.amp",
    "torch.distributed",
    "torch.distributed.checkpoint.stateful",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.pipelining.schedules",
    "accelerate",
    "lightning.pytorch",
)
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "kernels", "pyparallel", "tests")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*")
COMMAND = re.compile(r"python3? -m ([\w.]+)(?: ([a-z]\w*))?", re.ASCII)
VARIABLE = re.compile(r"[A-Z_]+=\S*")  # of the environment
UNKNOWN = object()


def defined_in(code: str) -> set[str]:
    """Return all names that occur in Python code, so that text may mention them."""
    tree = ast.parse(code)
    names = {node.name for node in ast.walk(tree) if hasattr(node, "name") and node.name}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    stores = (node for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute)))
    stored = (node for node in stores if isinstance(node.ctx, ast.Store))
    return names | {getattr(node, "id", None) or node.attr for node in stored}


def fault(text: str, defined: set[str]) -> str | None:
    """Return what is wrong with a text in code style, else None.

    Args:
        text: such as ``SGP(topology, overlap=1)``.
        defined: the names that the page's own code defines.
    """
    if command := COMMAND.match(text):
        return _fault_of_command(*command.groups())
    if PATH.fullmatch(text):
        return None if (ROOT / text).exists() else f"{text} does not exist"
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    if VARIABLE.fullmatch(text):
        return None
    faults = (_fault_of_node(node, defined) for node in ast.walk(tree))
    return next((each for each in faults if each), None)


def _fault_of_command(module: str, argument: str | None) -> str | None:
    path = ROOT / module.replace(".", "/")
    if path.parts[len(ROOT.parts)] in FOLDERS:
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            return f"{module} does not exist"
        if module == "pyparallel" and argument and not (path / "cli" / f"{argument}.py").exists():
            return f"python -m pyparallel {argument} does not exist"
    return None


def _fault_of_node(node: ast.AST, defined: set[str]) -> str | None:
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        name = ast.unparse(node)
        capital = isinstance(node, ast.Name) and re.fullmatch(r"[A-Z][A-Za-z0-9]{2,}", name)
        if capital and name not in defined | _members() and not _found(name):
            return f"{name} does not exist"
        if isinstance(node, ast.Attribute) and _found(name) == []:
            return f"{name} does not exist"
    if isinstance(node, ast.Call):
        return _fault_of_call(node, defined)
    return None


def _fault_of_call(node: ast.Call, defined: set[str]) -> str | None:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if last in defined or not re.fullmatch(r"[\w.]+", name):
        return None
    found = _found(name)
    if not found:
        known = "_" not in last or last in _members()
        return None if known else f"{name}() does not exist"
    for keyword in node.keywords:
        if keyword.arg and not any(_takes(each, keyword.arg) for each in found):
            return f"{name}() has no argument {keyword.arg}"
    return None


@cache
def _found(name: str) -> list | None:
    """Return the objects that a name may mean; None where it begins with an unknown name."""
    first, *rest = name.split(".")
    package = NAMESPACES.get(first)
    if package and (first in ALIASES or (rest and rest[0][0].isupper())):
        full = ".".join([package, *rest])
        return [pkgutil.resolve_name(full)] if exists(full) else []
    if rest and not first[0].isupper():
        return None
    found = [getattr(module, first) for module in _modules() if first in _names_in(module)]
    if not found:
        return None
    for part in rest:
        found = [getattr(each, part, None) for each in found if _has(each, part)]
    return found


def _modules() -> list:
    return [import_package(name) for name in MODULES]


def _names_in(module: object) -> set[str]:
    return {*vars(module), *getattr(module, "__all__", ())}  # some are imported when they are used


def _has(value: object, name: str) -> bool:
    """Whether an object, or an instance of a class, has an attribute."""
    if not inspect.isclass(value):
        return hasattr(value, name)
    bases = [base for base in value.__mro__ if base.__module__.startswith("pyparallel")]
    of_instances = "".join(inspect.getsource(base) for base in bases)
    if inspect.getattr_static(value, name, UNKNOWN) is not UNKNOWN:
        return True
    return re.search(rf"\bself\.{name}\b|^    {name}: ", of_instances, re.MULTILINE) is not None


@cache
def _members() -> set[str]:
    """Return the names of functions, of members of classes, and of arguments."""
    found: set[str] = set()
    for module in _modules():
        found |= {name for name in _names_in(module) if not name[0].isupper()}
        classes = [each for each in vars(module).values() if issubclass(type(each), type)]
        found |= set().union(*map(dir, classes))
    for package in PACKAGES:
        for value in public_names(package).values():
            found |= set(_parameters(value))
    return found


def _parameters(value: object) -> dict[str, inspect.Parameter]:
    """Return the parameters by name; a callable written in C may have none that are known."""
    try:
        return dict(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return {}


def _takes(value: object, keyword: str) -> bool:
    parameters = _parameters(value)
    variadic = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return variadic or not parameters or keyword in parameters
