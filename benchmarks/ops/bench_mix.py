"""``mix_``, ``add_or_clear_`` and ``screen_headers`` against torch's ops and torch.compile."""

import torch

from benchmarks.harness.measure import Case, Provider, beside, compile_reference, name_of, sweep
from pyparallel.ops import add_or_clear_, mix_, screen_headers
from pyparallel.ops.mix import (
    NUM_COLUMNS,
    add_or_clear_reference,
    mix_reference,
    screen_headers_reference,
)

CASES = [
    # dtype of z, dtype of the messages, how many
    (torch.float32, torch.float32, 1),
    (torch.float32, torch.float32, 2),
    (torch.float32, torch.bfloat16, 1),
    (torch.bfloat16, torch.bfloat16, 1),
]
NUM_HEADERS = 4  # of a round with four neighbors, at every size
TIMES = 8.0


def make_case(device, numel, dtype, message_dtype, num_messages) -> Case:
    z = torch.randn(numel, device=device).to(dtype)
    messages = [torch.randn(numel, device=device).to(message_dtype) for _ in range(num_messages)]
    share = 1 / (num_messages + 1)
    kept = torch.tensor(share, dtype=torch.float64, device=device)
    weight = kept.clone()
    masses = torch.full((num_messages,), share, dtype=torch.float64, device=device)
    compiled = compile_reference(mix_reference, device)

    def ours() -> None:
        weight.copy_(kept)
        mix_(z, weight, messages, masses)

    def separate_ops() -> None:
        z.mul_(share)
        for message in messages:
            z.add_(message, alpha=share)

    def compiled_reference() -> None:
        weight.copy_(kept)
        compiled(z, weight, messages, masses)

    providers = [
        Provider("pyparallel mix_", ours),
        Provider("torch mul_, add_", separate_ops),
        Provider("torch.compile of reference", compiled_reference),
    ]
    if num_messages == 1 and dtype == message_dtype:
        providers.append(Provider("torch lerp_", lambda: z.lerp_(messages[0], share)))
    num_bytes = numel * (2 * dtype.itemsize + num_messages * message_dtype.itemsize)
    name = f" + {num_messages} ".join(name_of(dtype, message_dtype))
    return Case("mix", name, numel, num_bytes, providers, device)


def make_sum(device, numel) -> Case:
    x, y = (torch.randn(numel, device=device) / 1e6 for _ in range(2))
    compiled = compile_reference(add_or_clear_reference, device, x, y, TIMES, None)

    def separate_ops() -> None:
        total = torch.add(x, y, alpha=TIMES)
        torch.where(total.isfinite(), total, x, out=x)

    providers = beside(lambda: add_or_clear_(x, y, times=TIMES), separate_ops, compiled)
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


def make_screen(device, numel) -> Case:
    expected = torch.ones(NUM_HEADERS, NUM_COLUMNS, dtype=torch.float64)
    expected[:, 0] = 0
    rows = torch.ones_like(expected, device=device)
    masses = torch.empty(NUM_HEADERS, dtype=torch.float64, device=device)
    counter = torch.zeros((), dtype=torch.int64, device=device)

    def separate_ops() -> None:
        screen_headers_reference(rows, expected, masses, counter)

    providers = [
        Provider("pyparallel", lambda: screen_headers(rows, expected, counter=counter)),
        Provider("torch ops", separate_ops, captured=False),
    ]
    return Case("screen_headers", "4 headers", numel, rows.nbytes, providers, device)


cases = sweep((make_case, CASES), (make_sum, [()]), (make_flag, [()]), (make_screen, [()]))
