"""The least versions of the hosts."""

from importlib.metadata import PackageNotFoundError, version

from torch.torch_version import TorchVersion


def require(package: str, least: str) -> None:
    """Check that a host is installed and not too old; call it before the host is imported.

    Args:
        package: a distribution, such as "lightning".
        least: the oldest version that has what the adapter uses.

    Raises:
        ImportError: it is missing or older; the message names the least version.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if found == "none" or TorchVersion(found) < least:
        raise ImportError(
            f"pyparallel.integrations needs {package} {least} or newer, got {found}; "
            f"pip install '{package}>={least}'"
        )
