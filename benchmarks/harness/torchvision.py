"""torchvision beside a torch of another build, as transformers and timm import it."""

import torch

OPERATORS = ("nms", "qnms")  # whose shapes torchvision registers when it is imported


def load_torchvision() -> None:
    """Import torchvision, also where its compiled operators do not load.

    PyPI's wheel is built for CUDA, and does not load beside a CPU torch: its import then ends in
    "operator torchvision::nms does not exist", and with it those of transformers and timm, which
    use none of the operators for the models here.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in OPERATORS:
            torch.library.define(f"torchvision::{name}", schema)
        import torchvision  # noqa: F401
