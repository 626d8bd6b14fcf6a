"""``predict_sgd`` against torch: ``add`` with ``alpha``, and torch.compile of the reference."""

import torch

from benchmarks.harness.measure import Case, beside, compile_reference, name_of, sweep
from pyparallel.ops import predict_sgd
from pyparallel.ops.predict_sgd import predict_sgd_reference


def make_case(device, numel, out_dtype) -> Case:
    param, buffer = (torch.randn(numel, device=device) for _ in range(2))
    out = torch.empty(numel, device=device, dtype=out_dtype)
    lr, horizon = (torch.tensor(value, dtype=torch.float64) for value in (0.1, 3.0))
    compiled = compile_reference(predict_sgd_reference, device, param, buffer, lr, horizon, out)

    def ours() -> None:
        predict_sgd(param, buffer, lr=lr, horizon=horizon, out=out)

    def separate_ops() -> None:
        if out_dtype == torch.float32:
            torch.add(param, buffer, alpha=-0.3, out=out)
        else:
            out.copy_(torch.add(param, buffer, alpha=-0.3))

    providers = beside(ours, separate_ops, compiled, "torch add (alpha)")
    name = f"float32 to {name_of(out_dtype)[0]}"
    num_bytes = numel * (8 + out_dtype.itemsize)
    return Case("predict_sgd", name, numel, num_bytes, providers, device)


cases = sweep((make_case, [(torch.float32,), (torch.bfloat16,)]))
