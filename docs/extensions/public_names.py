"""The reference: every public name, from its docstring, on one page.

A page of the reference writes ``{{ reference("pyparallel.gossip", "SGP", "DPSGD") }}``. The build
fails where a public name is on no page.
"""

import importlib
import inspect
from types import ModuleType

import rendered_pages
from sphinx.errors import ExtensionError

from benchmarks.harness.libraries import load

PACKAGES = (
    "pyparallel.gossip",
    "pyparallel.gossip.topology",
    "pyparallel.pipeline",
    "pyparallel.subnets",
    "pyparallel.sequence",
    "pyparallel.compression",
    "pyparallel.planning.pipelines",
    "pyparallel.planning.recommend",
    "pyparallel.planning.simulate",
    "pyparallel.optim",
    "pyparallel.training",
    "pyparallel.comm",
    "pyparallel.gossip.messages",
    "pyparallel.pipeline.messages",
    "pyparallel.ops",
    "pyparallel.integrations.accelerate",
    "pyparallel.integrations.lightning",
    "pyparallel.integrations.metrics_log",
    "pyparallel.integrations.transformers",
)


def import_package(package: str) -> ModuleType:
    """Return a package, also where the hosts that it imports need a torchvision that loads."""
    if package.startswith("pyparallel.integrations"):
        load("lightning")  # torchvision may not load beside this torch
    return importlib.import_module(package)


def public_names(package: str) -> dict[str, object]:
    """Return the objects in ``__all__`` by name, without modules."""
    module = import_package(package)
    found = {name: getattr(module, name) for name in module.__all__}
    return {name: each for name, each in found.items() if not inspect.ismodule(each)}


def targets() -> dict[str, str]:
    """Return the full name by short name; of names in two packages, that of the first package."""
    found = {}
    for package in PACKAGES:
        for name in public_names(package):
            found.setdefault(name, f"{package}.{name}")
    return found


def reference(package: str, *names: str) -> str:
    """Return directives that document names of a package.

    Raises:
        LookupError: the package has no such public name.
    """
    known = public_names(package)
    lines = ["```{eval-rst}", f".. currentmodule:: {package}"]
    for name in names:
        if name not in known:
            raise LookupError(f"{package} has no public name {name}, only {', '.join(known)}")
        lines += ["", *directive(name, known[name])]
    return "\n".join([*lines, "```"])


def directive(name: str, value: object) -> list[str]:
    """Return the lines that document one object."""
    if inspect.isclass(value):
        if issubclass(value, BaseException):
            return [f".. autoexception:: {name}"]
        return [f".. autoclass:: {name}", "   :members:"]
    if callable(value):
        return [f".. autofunction:: {name}"]
    return [f".. autodata:: {name}", "   :no-value:"]


def _skip_members(app, what, name, value, skip, options):
    """Leave out what a host calls, and a field whose default is a function of another name."""
    module = getattr(value, "__module__", None) or ""
    if module.startswith("pyparallel.integrations.") and hasattr(value, "__override__"):
        return True
    own_name = getattr(getattr(value, "fget", value), "__name__", name)
    is_default = what == "class" and not inspect.isclass(value) and own_name != name
    return True if is_default else None  # otherwise autodoc decides


def _check_all_are_documented(app, env):
    documented = {name for name, *_ in env.domains["py"].get_objects()}
    missing = [
        f"{package}.{name}"
        for package in PACKAGES
        for name in public_names(package)
        if f"{package}.{name}" not in documented and targets()[name] not in documented
    ]
    if missing:
        raise ExtensionError(f"reference: these public names are on no page: {', '.join(missing)}")


def _keep_colon_of_property(app, what, name, value, options, lines):
    """Keep Napoleon from reading the start of "Return a: (n,) int" as a type."""
    if what in ("property", "attribute", "data") and lines:
        lines[0] = lines[0].replace(": ", " \N{EN DASH} ", 1)


def _shorten_defaults(app, what, name, value, options, signature, returned):
    """Write a dataclass's default factories as "...": "<factory>" is not Python."""
    return (signature and signature.replace("<factory>", "..."), returned)


def setup(app):
    """Register with Sphinx."""
    app.connect("autodoc-skip-member", _skip_members)
    app.connect("autodoc-process-signature", _shorten_defaults)
    app.connect("autodoc-process-docstring", _keep_colon_of_property, priority=100)
    rendered_pages.ENVIRONMENT.globals["reference"] = reference
    app.connect("env-check-consistency", _check_all_are_documented)
    return {"parallel_read_safe": True}
