"""Libraries that import torchvision, beside a torch that it was not built for.

``python -m benchmarks.harness.libraries SCRIPT ...`` runs a script that imports transformers.
"""

import contextlib
import importlib
import runpy
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch


@cache
def load(name: str) -> ModuleType:
    """Return a module of transformers, timm or torchvision.

    PyPI's torchvision is built for CUDA: beside a CPU torch its compiled operators do not load, and
    its import ends in "operator torchvision::nms does not exist", where it registers the shapes of
    two of them. The models of tests and benchmarks have no such operator. Without torchvision
    nothing is needed.
    """
    with contextlib.suppress(ModuleNotFoundError):
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for each in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{each}", schema)
    return importlib.import_module(name)


if __name__ == "__main__":
    load("transformers")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
