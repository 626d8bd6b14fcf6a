"""The least versions of the hosts."""

from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion


def require_version(package: str, least: str) -> None:
    """Raise an ImportError unless a distribution is installed and not older than ``least``."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if found == "none" or TorchVersion(found) < least:
        raise ImportError(
            f"pyparallel.integrations needs {package} {least} or newer, got {found}; "
            f"pip install '{package}>={least}'"
        )
