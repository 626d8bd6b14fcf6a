"""A host that is missing or too old is one sentence with the least version."""

import importlib
import sys
from importlib.metadata import PackageNotFoundError
from unittest import mock

import pytest

from pyparallel.integrations import versions


def test_an_old_or_missing_host_is_one_sentence_with_the_least_version():
    versions.require_version("pytest", "1.0")
    with pytest.raises(ImportError, match=r"pytest 999\.0 or newer, got \d+\."):
        versions.require_version("pytest", "999.0")
    with pytest.raises(ImportError, match=r"nothing-of-this-name 2\.1 or newer, got none"):
        versions.require_version("nothing-of-this-name", "2.1")
    with (
        mock.patch.object(versions, "version", return_value="2.10.0.dev1"),
        pytest.raises(ImportError, match=r"2\.10 or newer, got 2\.10\.0\.dev1"),
    ):
        versions.require_version("host", "2.10")


def test_ray_is_asked_for_before_it_is_imported(monkeypatch):
    name = "pyparallel.integrations.ray"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(versions, "version", mock.Mock(side_effect=PackageNotFoundError))
    with pytest.raises(ImportError, match=r"needs ray 2\.60 or newer, got none; pip install 'ray>"):
        importlib.import_module(name)
