"""``pack_signs`` and its inverse against chains of torch's ops and of numpy's around packbits."""

import numpy as np
import torch

from benchmarks.harness.measure import Case, Provider, sweep
from pyparallel.ops import pack_signs, unpack_signs

BLOCK_SIZE = 1024


def make_case(device: str, numel: int, has_residual: bool) -> Case:
    x, residual = (torch.randn(numel, device=device) for _ in range(2))
    accumulated = torch.empty_like(x)
    places = torch.arange(8, dtype=torch.uint8, device=device)

    def ours() -> None:
        pack_signs(x, residual=residual if has_residual else None)

    def torch_ops() -> None:
        own = torch.add(x, residual, out=accumulated) if has_residual else x
        scales = own.view(-1, BLOCK_SIZE).abs().mean(dim=1)
        is_set = own >= 0
        is_set.view(-1, 8).to(torch.uint8).bitwise_left_shift_(places).sum(dim=1, dtype=torch.uint8)
        if has_residual:
            sent = torch.where(is_set.view(-1, BLOCK_SIZE), scales[:, None], -scales[:, None])
            torch.sub(own, sent.flatten(), out=residual)

    def numpy_ops() -> None:
        own = x.numpy() + residual.numpy() if has_residual else x.numpy()
        blocks = own.reshape(-1, BLOCK_SIZE)
        scales = np.abs(blocks).mean(axis=1, keepdims=True)
        is_set = blocks >= 0
        np.packbits(is_set, bitorder="little")
        if has_residual:
            np.subtract(blocks, np.where(is_set, scales, -scales), out=blocks)
            residual.numpy()[:] = own

    providers = [Provider("pyparallel", ours), Provider("torch ops", torch_ops)]
    if device == "cpu":
        providers.append(Provider("numpy packbits chain", numpy_ops))
    num_bytes = numel * (12 if has_residual else 4) + numel // 8 + 4 * (numel // BLOCK_SIZE)
    name = f"pack, {'' if has_residual else 'no '}residual"
    return Case("pack_signs", name, numel, num_bytes, providers, device)


def make_case_of_inverse(device: str, numel: int, accumulate: bool) -> Case:
    words, scales = pack_signs(torch.randn(numel, device=device))
    out = torch.zeros(numel, device=device)
    places = torch.arange(8, dtype=torch.uint8, device=device)

    def ours() -> None:
        unpack_signs(words, scales, numel=numel, out=out, accumulate=accumulate)

    def finish(is_set: torch.Tensor) -> None:
        sent = torch.where(is_set.view(-1, BLOCK_SIZE), scales[:, None], -scales[:, None]).flatten()
        if accumulate:
            out.add_(sent)
        else:
            out.copy_(sent)

    def torch_ops() -> None:
        finish((words[:, None] >> places & 1).to(torch.bool))

    def numpy_ops() -> None:
        finish(torch.from_numpy(np.unpackbits(words.numpy(), bitorder="little").view(bool)))

    providers = [Provider("pyparallel", ours), Provider("torch ops", torch_ops)]
    if device == "cpu":
        providers.append(Provider("numpy unpackbits chain", numpy_ops))
    num_bytes = numel * (8 if accumulate else 4) + numel // 8 + 4 * (numel // BLOCK_SIZE)
    name = f"unpack, {'accumulate' if accumulate else 'overwrite'}"
    return Case("pack_signs", name, numel, num_bytes, providers, device)


BOTH = [(True,), (False,)]
cases = sweep((make_case, BOTH), (make_case_of_inverse, BOTH))
