import pytest
import torch

from pyparallel.pipeline.runtime.microbatches import MicrobatchSplitter


def test_splits_like_tensor_split_and_counts_from_first():
    splitter = MicrobatchSplitter(torch.arange(10), (torch.arange(10), torch.ones(10, 2)), 8, 4)
    assert [splitter.inputs(8 + each).tolist() for each in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
        [8, 9],
    ]
    assert splitter.target(11)[1].shape == (2, 2)
    assert [splitter.share(8 + each) for each in range(4)] == [0.3, 0.3, 0.2, 0.2]


BAD_INPUTS = [
    (None, "inputs must be given on the rank of the first stage, got None"),
    (torch.ones(()), "inputs must be a tensor or tuple of tensors whose first dimension"),
    ((), "inputs must be a tensor or tuple of tensors whose first dimension"),
    ([1, 2], "inputs must be a tensor or tuple of tensors whose first dimension"),
    (
        {"input_ids": torch.full((4,), 77.0), "mask": torch.ones(4)},
        "got a dict with keys 'input_ids', 'mask'; pass a tuple of its tensors$",
    ),
    ([torch.full((4,), 77.0), "x"], r"got a list of 2: a tensor of shape \[4\], 'x'$"),
    (
        torch.ones(3),
        "at least one for each of the 4 microbatches, got \\[3\\]; use drop_last=True, or fewer m",
    ),
    ((torch.ones(4), torch.ones(5)), "must have one number of samples.* got \\[4, 5\\]$"),
]


def test_a_batch_that_cannot_be_split_is_refused(subtests):
    for inputs, message in BAD_INPUTS:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            MicrobatchSplitter(inputs, None, 0, 4).inputs(0)
