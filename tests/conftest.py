"""Without a GPU the Triton kernels run under Triton's interpreter, which must be chosen first."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
