"""A CUDA library that cannot run here is not loaded, for a reason that is one sentence."""

import pytest
import torch

from pyparallel.ops import _library


def test_the_version_of_a_driver_is_read_where_there_is_one():
    assert (_library._driver_version() >= 12000) == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("cuda", "driver", "reason"),
    [
        (None, 0, "built, but not loaded: this torch has no CUDA"),
        ("12.8", 12080, "built with CUDA 13, which this driver for CUDA 12.8 cannot run: update "
         "the driver"),
        ("12.8", 13000, None),  # the library has a CUDA runtime of its own
        ("13.2", 0, None),  # no driver and no GPU
    ],
)  # fmt: skip
def test_a_cuda_library_that_cannot_run_is_not_loaded(monkeypatch, tmp_path, cuda, driver, reason):
    (tmp_path / "libpyparallel_cuda.so").touch()
    (tmp_path / "build.json").write_text('{"cuda": "built with nvcc 13.0.88 for 80-real"}')
    monkeypatch.setattr(_library, "_NATIVE_FOLDER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(_library, "_driver_version", lambda: driver)
    found = _library.load_native("cuda").unavailable_reason
    # A library that is tried is none: it has no bytes.
    assert found == reason or (reason is None and "it does not load" in found)
