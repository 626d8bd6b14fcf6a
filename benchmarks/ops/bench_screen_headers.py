"""``screen_headers`` against its reference, which is torch's separate ops."""

import torch

from benchmarks.harness.measure import Case, Provider, sweep
from pyparallel.ops import screen_headers
from pyparallel.ops.screen_headers import NUM_COLUMNS, screen_headers_reference

NUM_HEADERS = 4  # of a round with four neighbors, at every size


def make_case(device, numel) -> Case:
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


cases = sweep((make_case, [()]))
