"""``predict_adam`` against torch: four separate ops, and torch.compile of the reference."""

import torch

from benchmarks.harness.measure import Case, beside, compile_reference, name_of, sweep
from pyparallel.ops import predict_adam
from pyparallel.ops.predict_adam import predict_adam_reference

BETA1, BETA2, EPS, STEP, HORIZON, LR = 0.9, 0.999, 1e-8, 100.0, 3.0, 1e-3


def make_case(device, numel, out_dtype) -> Case:
    param, mean, root = (torch.randn(numel, device=device) for _ in range(3))
    square = root.square_()
    out = torch.empty(numel, device=device, dtype=out_dtype)
    scratch = torch.empty_like(param)
    lr, step, horizon = (torch.tensor(x, dtype=torch.float64) for x in (LR, STEP, HORIZON))
    numbers = lr, BETA1, BETA2, EPS, step, horizon, out
    compiled = compile_reference(predict_adam_reference, device, param, mean, square, *numbers)
    correction = (1 - BETA2**STEP) ** 0.5
    step_size = LR * HORIZON / (1 - BETA1**STEP)

    def ours() -> None:
        numbers = {"lr": lr, "beta1": BETA1, "beta2": BETA2, "eps": EPS}
        predict_adam(param, mean, square, **numbers, step=step, horizon=horizon, out=out)

    def separate_ops() -> None:
        torch.sqrt(square, out=scratch)
        scratch.div_(correction).add_(EPS)
        if out_dtype == torch.float32:
            torch.addcdiv(param, mean, scratch, value=-step_size, out=out)
        else:
            out.copy_(torch.addcdiv(param, mean, scratch, value=-step_size))

    providers = beside(ours, separate_ops, compiled, "torch sqrt, div, add, addcdiv")
    name = f"float32 to {name_of(out_dtype)[0]}"
    num_bytes = numel * (12 + out_dtype.itemsize)
    return Case("predict_adam", name, numel, num_bytes, providers, device)


cases = sweep((make_case, [(torch.float32,), (torch.bfloat16,)]))
