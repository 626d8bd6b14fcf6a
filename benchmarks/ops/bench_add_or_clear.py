"""``add_or_clear_`` against torch's separate ops, and torch.compile of the reference."""

import torch

from benchmarks.harness.measure import Case, Provider, compile_reference, sweep
from pyparallel.ops import add_or_clear_
from pyparallel.ops.add_or_clear import add_or_clear_reference

TIMES = 8.0


def make_sum(device, numel) -> Case:
    x, y = (torch.randn(numel, device=device) / 1e6 for _ in range(2))
    compiled = compile_reference(add_or_clear_reference, device)

    def separate_ops() -> None:
        total = torch.add(x, y, alpha=TIMES)
        torch.where(total.isfinite(), total, x, out=x)

    providers = [
        Provider("pyparallel", lambda: add_or_clear_(x, y, times=TIMES)),
        Provider("torch ops", separate_ops),
        Provider("torch.compile of reference", lambda: compiled(x, y, TIMES, None)),
    ]
    return Case("add_or_clear", "float32 + float32", numel, 12 * numel, providers, device)


def make_flag(device, numel) -> Case:
    """Return a case in which the flag is not set: it is all that must be read."""
    x = torch.randn(numel, device=device)
    clear = torch.zeros((), dtype=torch.bool, device=device)
    providers = [
        Provider("pyparallel", lambda: add_or_clear_(x, clear=clear)),
        Provider("torch masked_fill_", lambda: x.masked_fill_(clear, 0.0)),
    ]
    return Case("add_or_clear", "flag not set", numel, 1, providers, device)


cases = sweep((make_sum, [()]), (make_flag, [()]))
