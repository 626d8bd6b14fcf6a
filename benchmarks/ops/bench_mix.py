"""``mix_`` against torch: ``mul_`` + ``add_``, ``lerp_`` (one message only) and torch.compile."""

import torch

from benchmarks.harness.measure import Case, Provider, compile_reference, name_of, sweep
from pyparallel.ops import mix_
from pyparallel.ops.mix import mix_reference

CASES = [
    # dtype of z, dtype of the messages, how many
    (torch.float32, torch.float32, 1),
    (torch.float32, torch.float32, 2),
    (torch.float32, torch.bfloat16, 1),
    (torch.bfloat16, torch.bfloat16, 1),
]


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


cases = sweep((make_case, CASES))
