"""The bytes of the tensors that autograd saves."""

import torch

from pyparallel.pipeline.partition.saved_bytes import SavedBytes, storages


def test_each_storage_counts_once_and_as_a_whole():
    x = torch.ones(4, 8, requires_grad=True)
    with (saved := SavedBytes()):
        y = x.exp()  # saves its result
        z = y[:1] * y[1:2]  # saves two views of it
    assert sorted(saved.held().values()) == [4 * 8 * 4]
    assert saved.held().keys() == storages([y]).keys()
    assert z.requires_grad


def test_freed_tensors_do_not_count():
    x = torch.ones(8, requires_grad=True)
    with (saved := SavedBytes()):
        x.exp()
        y = x.double().exp()
    assert list(saved.held().values()) == [8 * 8]
    y.sum().backward()
    assert saved.held() == {}
    assert torch.equal(x.grad, torch.ones(8).double().exp().float())


def test_the_counter_keeps_no_tensor_alive():
    x = torch.ones(8, requires_grad=True)
    with (saved := SavedBytes()):
        y = x.exp().tanh()
    assert len(saved.held()) == 2
    del y
    assert saved.held() == {}


def test_sparse_tensors_are_not_counted():
    assert storages([torch.eye(3).to_sparse()]) == {}
