"""The hook of DDP made before there is a process group, on two ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel.comm import DisagreementError
from pyparallel.compression import Cast, ErrorFeedback, Int8, PerParameter, TopK, ddp_hook

SPARSE = ErrorFeedback(TopK(0.1))
LATER = "sparse", "resumed", "named", "compiled"  # models that are wrapped later
NAMED = PerParameter({"*.bias": Cast(), "*": ErrorFeedback(Int8())})


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 3))


def train(rank, ddp, begin=0, end=4):
    """Return the gradients of steps, of this rank's batches."""
    found = []
    for index in range(begin, end):
        batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * index + rank))
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
    return torch.stack(found)


def attach(pair, model=None, **options):
    ddp = DistributedDataParallel(build() if model is None else model, **options)
    ddp.register_comm_hook(*pair)
    return ddp


def refuse_what_needs_no_ranks(rank, saved):
    with pytest.raises(TypeError, match=r"^compressor must be an object such as .* got the class"):
        ddp_hook(Int8)
    with pytest.raises(TypeError, match=r"^model must be the module .*, or None, got "):
        ddp_hook(Int8(), list(build().parameters()))
    with pytest.raises(ValueError, match=r"^nonfinite must be .*, got 'ignore'$"):
        ddp_hook(Int8(), nonfinite="ignore")
    state, _ = ddp_hook(Int8())
    assert state.residual_norm == state.last_step.wire_bytes == sum(state.metrics().values()) == 0
    needs_group = "needs the process group of DistributedDataParallel, got none: call torch"
    with pytest.raises(RuntimeError, match=needs_group):
        state.state_dict()
    with pytest.raises(RuntimeError, match=needs_group):
        state.reduce(torch.zeros(3), [torch.zeros(3)], last=True)
    with pytest.raises(ValueError, match=r"^state must have been saved with compressor Int8"):
        state.load_state_dict(saved)
    for malformed in ({}, [saved], {**saved, "parameters": {"0.weight": {"residual": 1}}}):
        with pytest.raises(ValueError, match=r"^state must be|is not what was saved"):
            state.load_state_dict(malformed)


def fail_together(rank, pair, match, **options):
    """Backward raises the same sentence on all ranks, and again if the user goes on."""
    ddp, texts = attach(pair, **options), []
    for _ in range(2):
        with pytest.raises(DisagreementError, match=match) as caught:
            train(rank, ddp, 0, 1)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    return texts[0]


def all_cases(rank, folder):
    eager_state, hook = ddp_hook(SPARSE, build_named := build())
    eager = attach((eager_state, hook), build_named)
    expected = {"sparse": train(rank, eager, 0, 2)}
    saved = copy.deepcopy(eager_state.state_dict())
    expected["resumed"] = train(rank, eager, 2, 4)
    eager = build()
    expected["named"] = train(rank, attach(ddp_hook(NAMED, eager), eager))

    states = [None, None]
    dist.all_gather_object(states, saved)

    dist.destroy_process_group()
    refuse_what_needs_no_ranks(rank, saved)
    wrapped_later = {name: build() for name in LATER}
    pairs = {
        "sparse": ddp_hook(SPARSE, wrapped_later["sparse"]),
        "resumed": ddp_hook(SPARSE, wrapped_later["resumed"]),
        "numbered": ddp_hook(SPARSE),
        "named": ddp_hook(NAMED, wrapped_later["named"]),
        "compiled": ddp_hook(SPARSE, wrapped_later["compiled"]),
        "other compressors": ddp_hook([Int8(), Cast()][rank]),
        "other policies": ddp_hook(Int8(), nonfinite=["skip", "raise"][rank]),
        "one loaded": ddp_hook(SPARSE, build()),
        "of the other rank": ddp_hook(SPARSE, build()),
    }
    mine = copy.deepcopy(saved)
    pairs["resumed"][0].load_state_dict(mine)
    next(iter(mine["parameters"].values())).clear()  # a copy is kept
    if rank:
        pairs["one loaded"][0].load_state_dict(saved)
    pairs["of the other rank"][0].load_state_dict(states[1])

    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    assert pairs["sparse"][0].state_dict()["num_ranks"] == 2  # exchanges nothing
    found = {
        "sparse": train(rank, attach(pairs["sparse"], wrapped_later["sparse"]), 0, 2),
        "resumed": train(rank, attach(pairs["resumed"], wrapped_later["resumed"]), 2, 4),
        "named": train(rank, attach(pairs["named"], wrapped_later["named"])),
    }
    for name, gradients in found.items():
        assert torch.equal(gradients, expected[name]), name
    keys = pairs["sparse"][0].state_dict()["parameters"].keys()
    assert keys == {"0.weight", "0.bias", "2.weight", "2.bias"}
    numbered = train(rank, attach(pairs["numbered"]), 0, 2)
    assert torch.equal(numbered, expected["sparse"])
    assert pairs["numbered"][0].state_dict()["parameters"].keys() == {"0", "1", "2", "3"}
    compiled = torch.compile(wrapped_later["compiled"], backend="eager")
    torch.testing.assert_close(
        train(rank, attach(pairs["compiled"], compiled), 0, 2), expected["sparse"]
    )
    assert pairs["compiled"][0].state_dict()["parameters"].keys() == keys

    with pytest.raises(TypeError, match=r"^rank 1: model must be the module .*, got 'mlp'$"):
        ddp_hook(Int8(), [None, "mlp"][rank])
    loads_now, _ = pair = ddp_hook(SPARSE, later := build())
    loads_now.load_state_dict(saved)
    assert torch.equal(train(rank, attach(pair, later), 2, 4), expected["resumed"])

    texts = {
        "other compressors": r"same compressor, got Int8.* and Cast.* on rank 1",
        "other policies": "same nonfinite, got skip on rank 0 and raise on rank 1",
        "one loaded": "same number of messages of state, got none on rank 0 and 0, 2 on rank 1",
        "of the other rank": "^rank 0: state must have been saved with rank 0, got 1",
    }
    return [
        fail_together(rank, pairs[name], match, find_unused_parameters=name == "one loaded")
        for name, match in texts.items()
    ]


def test_a_hook_made_before_the_group_starts_at_the_first_bucket(ranks, tmp_path):
    first, second = ranks.run(2, all_cases, tmp_path)
    assert first == second
