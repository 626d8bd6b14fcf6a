"""Cast: sums in 16 bits are those of torch's hooks, and are refused where nothing is summed."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pyparallel.compression import (
    AttachPoint,
    BufferLayout,
    Cast,
    Chain,
    Collectives,
    ErrorFeedback,
    RandomK,
    compress_ddp,
)
from tests.workers import on_ranks

BF16, FP16 = torch.bfloat16, torch.float16


def test_accumulate_is_checked_and_in_the_repr():
    assert repr(Cast()) == "Cast(dtype=torch.bfloat16)"  # as in saved states
    for compressor in (Cast(FP16), Cast(BF16, accumulate=BF16), Cast(FP16, accumulate=FP16)):
        assert eval(repr(compressor)) == compressor
    assert repr(Cast(accumulate=BF16)) != repr(Cast())
    for dtype, wrong in ((BF16, FP16), (FP16, BF16), (BF16, torch.float64), (BF16, None)):
        with pytest.raises(ValueError, match=f"accumulate must be torch.float32 or.*{dtype}, got"):
            Cast(dtype, accumulate=wrong)


def test_sums_of_16_bits_are_for_ddp_without_error_feedback():
    compressor = Cast(accumulate=BF16)
    for place in AttachPoint:
        refusal = compressor.error_at(place)
        assert (refusal is None) == (place is AttachPoint.DDP), place
        assert Cast().error_at(place) is None
    assert "reduce_dtype" in compressor.error_at(AttachPoint.FSDP_GRADIENTS)
    for unfit in (compressor, Chain(RandomK(0.5), compressor)):
        with pytest.raises(ValueError, match="must take a residual, got"):
            ErrorFeedback(unfit)
    state, x = Cast().init(BufferLayout.flat(4), torch.device("cpu")), torch.ones(4)
    with pytest.raises(ValueError, match="residual must be None"):
        compressor.mean_(x, state, Collectives(), torch.zeros(4))


def bf16_hook(group, bucket):
    """Call torch's hook under a name that torch does not refuse on the CPU."""
    return default_hooks.bf16_compress_hook(group, bucket)


@on_ranks(3)
def test_sums_of_16_bits_have_the_bits_of_torch_s_hooks(rank):
    for dtype, hook in ((BF16, bf16_hook), (FP16, default_hooks.fp16_compress_hook)):
        gradients = []
        for ours in (True, False):
            torch.manual_seed(0)
            ddp = DistributedDataParallel(nn.Linear(50, 40), bucket_cap_mb=0.001)
            if ours:
                compress_ddp(ddp, Cast(dtype, accumulate=dtype))
            else:
                ddp.register_comm_hook(None, hook)
            torch.manual_seed(rank)
            batch = torch.randn(8, 50)
            for scale in (1, 1e5):  # of which fp16 makes inf
                ddp.zero_grad()
                (ddp(batch).square().mean() * scale).backward()
                gradients += [parameter.grad.clone() for parameter in ddp.parameters()]
        half = len(gradients) // 2
        assert all(map(torch.equal, gradients[:half], gradients[half:])), dtype
    x = torch.full((3,), 4e4)  # a sum above float16's largest
    Cast(FP16, accumulate=FP16).mean_(
        x, Cast().init(BufferLayout.flat(3), x.device, rank), Collectives()
    )
    assert (x - 4e4).abs().max() < 40
