"""Compressors in DDP and FSDP2 with each pair of features train as plain loops of all ranks."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pyparallel.compression import DGC, ErrorFeedback, TopK, compress_ddp, compress_fsdp
from tests.cases import pairwise
from tests.compression.catalog import CATALOG
from tests.pairs.loops import FEATURES, Feature, Loop, every_pair, forget_compiled, train_plainly

SPARSE = [(each, 0.0) for each in (TopK(0.2), ErrorFeedback(TopK(0.2)), DGC(0.2))]
# Coarse ones would hide a fault.
FULL = [(row.full_rate, row.tolerance) for row in CATALOG if row.full_rate and row.tolerance < 0.1]
COMPRESSORS = {str(each): (each, tolerance) for each, tolerance in SPARSE + FULL}
OF_DDP = ("static graph", "gradient_as_bucket_view")
FEATURES = {
    **{name: each for name, each in FEATURES.items() if name != "swapped"},
    "bfloat16": Feature(options={"dtype": torch.bfloat16}),
    **{name: Feature(options={name.replace(" ", "_"): True}) for name in OF_DDP},
}
FINDING_UNUSED = [name for name, each in FEATURES.items() if "finds_unused" in each.options]
# What torch does not allow itself: a static graph is one, and FSDP2 has no such options.
NOT_ALLOWED = {
    "ddp": [{"static graph", each} for each in ("accumulated", *FINDING_UNUSED)],
    "fsdp2": [{each} for each in OF_DDP],
}
REFUSED = {  # in FSDP2
    "PowerSGD": "compressor must not need matrices for the reduce-scatter of FSDP2",
    "PerParameter": "compressor must not depend on parameter names for the reduce-scatter of FSDP2",
    "our optimizer": "that fully_shard has sharded must be stepped in a GossipDataParallel",
}


class CompressedLoop(Loop):
    """A loop with DDP and a hook, or FSDP2 and its collectives."""

    static_graph = gradient_as_bucket_view = False

    def optimizer_kind(self):
        return self.kind

    def scale(self, optimizer):
        """Averages of gradients have no weights."""

    def shard(self):
        if self.wrapper == "fsdp2":
            fully_shard(self.module)

    def wrap(self):
        # Where a scaler looks for what is not finite, means must show it.
        policy = {"nonfinite": "allow" if self.scaler else "raise"}
        if self.wrapper == "fsdp2":
            self.state = compress_fsdp(self.module, gradients=self.compressor, **policy)
            return self.called
        ddp = DistributedDataParallel(
            self.called,
            forward_sync_buffers=False,
            find_unused_parameters=self.finds_unused,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        self.state = compress_ddp(ddp, self.compressor, **policy)
        return ddp

    @contextmanager
    def no_sync(self):
        if self.wrapper == "ddp":
            with self.forward.no_sync():
                yield
            return
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)

    def resume(self):
        """Go on in a new DDP or FSDP2 from what was saved."""
        states = copy.deepcopy([each.state_dict() for each in self.saved()])
        self.set_up()
        for each, state in zip(self.saved(), states, strict=True):
            each.load_state_dict(state)

    def saved(self):
        return [self.module, self.state, *self.optimizers, *self.schedulers, self.grad_scaler]


class Means:
    """Means of what ranks send of their gradients: the largest entries of each part.

    What a rank does not send waits for the next step (error feedback), of DGC with its momentum.
    FSDP2 reduces what has a gradient, in parts for each rank; DDP one buffer with zeros for the
    rest, and drops the means of what no rank has used.
    """

    def __init__(self, compressor, loops, is_sharded):
        self.loops, self.is_sharded = loops, is_sharded
        is_sparse = any(compressor == each for each, _ in SPARSE)
        self.waits = is_sparse and compressor.feeds_back
        self.density = getattr(compressor, "compressor", compressor).density if is_sparse else 1.0
        self.momentum = compressor.momentum if is_sparse and isinstance(compressor, DGC) else None
        self.kept = [[torch.zeros(2, *p.shape, dtype=p.dtype) for p in loop.parameters]
                     for loop in loops]  # fmt: skip

    def average_gradients(self):
        first = self.loops[0].parameters
        used = [place for place, p in enumerate(first) if p.grad is not None]
        places = used if self.is_sharded else range(len(first))
        means = [torch.zeros_like(first[place]) for place in places]
        for loop, of_rank in zip(self.loops, self.kept, strict=True):
            us, vs = zip(*(of_rank[place] for place in places), strict=True)
            for place, u, v in zip(places, us, vs, strict=True):
                p = loop.parameters[place]
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                if self.momentum is not None:
                    gradient = u.mul_(self.momentum).add_(gradient)
                v.copy_(v + gradient if self.waits else gradient)
            parts = len(self.loops) if self.is_sharded else 1
            for part in range(parts):
                self.send(*([each.chunk(parts)[part].view(-1) for each in tensors]
                            for tensors in (us, vs, means)))  # fmt: skip
        for loop in self.loops:
            for place, mean in zip(places, means, strict=True):
                if place in used:
                    loop.parameters[place].grad = mean / len(self.loops)

    def send(self, us, vs, means):
        """Add the largest entries of v to the means, and set them, and those of u, to 0."""
        whole = torch.cat(vs).abs()
        is_sent = torch.zeros_like(whole, dtype=torch.bool)
        is_sent[whole.topk(max(1, round(self.density * len(whole)))).indices] = True
        for u, v, mean, sent in zip(us, vs, means, is_sent.split([*map(len, vs)]), strict=True):
            mean.add_(v * sent)
            for each in (u, v):
                each[sent | ~each.isfinite()] = 0

    def before(self):
        """Change gradients alone."""

    after = before


def train(rank, wrapper, name, chosen):
    """Return the parameters after each step, or an error."""
    try:
        forget_compiled(chosen)
        features, compressor = [FEATURES[each] for each in chosen], COMPRESSORS[name][0]
        options = {"wrapper": wrapper, "compressor": compressor}
        return CompressedLoop(rank, features, torch.float32, **options).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def compare(wrapper, name, chosen, found):
    for whom, text in REFUSED.items() if wrapper == "fsdp2" else ():
        if name.startswith(whom) or whom in chosen:
            assert all(text in each for each in found), found[0]
            return
    forget_compiled(chosen)
    loops = [Loop(rank, [FEATURES[each] for each in chosen]) for rank in range(len(found))]
    compressor, tolerance = COMPRESSORS[name]
    expected = train_plainly(loops, [Means(compressor, loops, wrapper == "fsdp2")])
    most = tolerance + (0.02 if "bfloat16" in chosen else 1e-4)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert isinstance(ours, list), ours
        far = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
        assert all(each < most for each in far), (rank, far)  # no nan is


def rows_of_every_pair():
    """Return every pair of features with a compressor, in DDP and FSDP2 by turns."""
    lossless = [str(each) for each, _ in FULL]
    for number, (name, chosen) in enumerate(every_pair(list(COMPRESSORS), FEATURES)):
        allowed = [wrapper for wrapper, pairs in NOT_ALLOWED.items()
                   if not any(each <= {*chosen} for each in pairs)]  # fmt: skip
        is_tied = "bfloat16" in chosen and name not in lossless  # ties of bfloat16 have no order
        if allowed:
            yield allowed[number % len(allowed)], lossless[0] if is_tied else name, chosen


def check(ranks, subtests, rows):
    for row, found in zip(rows, ranks.run_each(2, train, rows, time_limit=300), strict=True):
        with subtests.test(str(row)):
            compare(*row, found)


def test_a_sample_of_pairs_trains_as_plain_loops(ranks, subtests):
    rows = pairwise(NOT_ALLOWED, [str(SPARSE[1][0]), str(SPARSE[2][0])], [
        ("frozen later", "resumed"), ("accumulated", "clipped")
    ])  # fmt: skip
    check(ranks, subtests, rows)


@pytest.mark.slow
def test_every_pair_of_features_trains_as_plain_loops(ranks, subtests):
    check(ranks, subtests, [*rows_of_every_pair()])
