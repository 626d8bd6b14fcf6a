import torch
from torch import nn

from pyparallel.pipeline.runtime.weight_copies import WeightCopies
from pyparallel.training import FlatBuckets

VIEWS = {
    "itself": lambda w: w,
    "transposed": lambda w: w.t(),
    "a part": lambda w: w[1:, ::2],
    "its last element": lambda w: w.flatten()[-1:],
    "expanded": lambda w: w[:, None].expand(4, 3, 6),
    "another dtype": lambda w: w.view(torch.int16)[:, 1:],
    "complex": lambda w: w.view(torch.complex64),
    "conjugate": lambda w: w.view(torch.complex64).conj(),
    "negative": lambda w: w.view(torch.complex64).conj().imag,
}


def build():
    """Return three copies of two groups, with a float16 buffer beside the others."""
    groups = [
        [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5).half())],
        [nn.Parameter(torch.randn(4, 6))],
    ]
    flat = [FlatBuckets(group, 1 << 30) for group in groups]
    copies = WeightCopies(flat)
    others = [copies.allocate() for _ in range(2)]
    for other in others:
        for buffer in other.buffers:
            buffer.normal_()
    return copies, [copies.current, *others], [p for group in groups for p in group]


def test_a_view_of_another_copy_becomes_the_same_view_of_the_current_one(subtests):
    copies, all_copies, parameters = build()
    for current in all_copies:
        copies.point_to(current)
        assert all(map(torch.equal, (p.data for p in parameters), current.views))
        for kind, view in VIEWS.items():
            for other in all_copies:
                with subtests.test(kind=kind):
                    for index in (0, 2):
                        saved = view(other.views[index])
                        expected = view(current.views[index])
                        for _ in range(2):  # found, and found again
                            got = copies.in_current(saved)
                            assert torch.equal(got, expected)
                            assert got.data_ptr() == expected.data_ptr()
                            assert (got.stride(), got.dtype) == (expected.stride(), expected.dtype)


def test_other_tensors_stay_as_they_are():
    copies, (live, other, _), parameters = build()
    copies.point_to(other)
    tensors = [torch.randn(3), torch.randn(100_000), torch.empty(0), torch.eye(3).to_sparse()]
    for tensor in (*tensors, *other.views, *parameters):
        assert copies.in_current(tensor) is tensor
    assert copies.in_current(live.views[0]) is not live.views[0]
