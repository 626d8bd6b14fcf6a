"""The sweep of block sizes, as far as it goes without a GPU."""

import shutil

import pytest

from benchmarks.tiles import sweep


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not found")
def test_it_compiles(tmp_path):
    sweep.main(["--compile-only", "sm_90", "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_rows_are_written_as_they_come(tmp_path, monkeypatch):
    program = tmp_path / "sweep"
    program.write_text("#!/bin/sh\necho mix,float32,512,8,8,$1,0.1,0.1,0.2,9.0,0.5\n")
    program.chmod(0o755)
    monkeypatch.setattr(sweep.torch.cuda, "get_device_name", lambda: "Some GPU")
    sweep.write_rows(program, [1024, 64], 3, tmp_path)
    header, first, second = (tmp_path / "tiles-some-gpu.csv").read_text().splitlines()
    assert header.startswith("op,case,threads,each,run,numel,median_ms")
    assert first.startswith("mix,float32,512,8,8,1024,0.1")
    assert second.split(",")[5] == "64"
    assert len(first.split(",")) == len(header.split(","))
