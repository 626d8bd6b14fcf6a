"""AllReduce takes steps of the mean gradient, as DistributedDataParallel to the last bit."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyparallel import GossipDataParallel
from pyparallel.gossip import AllReduce
from pyparallel.gossip.algorithms.all_reduce import all_reduce_sgd
from tests.gossip.loops import batches, build_model, flat, start
from tests.gossip.loops import train as train_on
from tests.workers import on_ranks


def train_wrapped_model(rank):
    model, optimizer, wrapped = start(AllReduce())
    return train_on(model, optimizer, batches(rank, 6), forward=wrapped)


def test_ranks_take_the_steps_of_the_mean_gradient(ranks):
    x, model = flat(build_model()), build_model()
    for data in zip(*(batches(rank, 6) for rank in range(3)), strict=True):
        gradients = []
        for inputs, targets in data:
            model.zero_grad()
            nn.utils.vector_to_parameters(x.clone(), model.parameters())
            nn.functional.mse_loss(model(inputs), targets).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        x = all_reduce_sgd(x, lambda gradient: 0.05 * gradient, torch.stack(gradients))
    for parameters in ranks.run(3, train_wrapped_model):
        torch.testing.assert_close(parameters, x, rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    """A sparse embedding, and layers of which a rank may use only one."""

    def __init__(self, sparse):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, words, unused):
        hidden = self.embedding(words)
        for index, layer in enumerate(self.layers):
            hidden = hidden if index == unused else layer(hidden).tanh()
        return hidden


def train(rank, is_plain, sparse, leaves_out, no_sync):
    """Return the gradients of each step, and the last parameters."""
    torch.manual_seed(0)
    model = Branches(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_plain:
        trainer = DistributedDataParallel(model, find_unused_parameters=leaves_out)
    else:
        algorithm = AllReduce(find_unused_parameters=leaves_out)
        trainer = GossipDataParallel(model, optimizer, algorithm)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for step in range(6):
        words = torch.randint(11, (5,), generator=generator)
        unused = step % 3 if leaves_out and rank == 1 else None
        if no_sync and step % 2:
            with trainer.no_sync():
                trainer(words, unused).square().sum().backward()
            words = torch.randint(11, (5,), generator=generator)
        trainer(words, unused).square().sum().backward()
        found += [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 > 0 or model.embedding.sparse)
    return [*found, *(p.detach().clone() for p in model.parameters())]


@on_ranks(3)
def test_gradients_and_parameters_are_those_of_ddp(rank):
    for case in [(False, False, True), (True, False, False), (False, True, False)]:
        assert all(map(torch.equal, train(rank, True, *case), train(rank, False, *case))), case


@on_ranks(2)
def test_ranks_evaluate_on_their_own_in_join(rank):
    """Also after another rank has run out of batches: no backward follows."""
    model, optimizer, wrapped = start(AllReduce())
    evaluated = []
    with wrapped.join():
        for number, (inputs, targets) in enumerate(batches(rank, 6 if rank == 0 else 2)):
            train_on(model, optimizer, [(inputs, targets)], forward=wrapped)
            if number in (1, 3):
                with torch.no_grad():
                    evaluated.append(torch.equal(wrapped(inputs), model(inputs)))
    assert evaluated == [True] * (2 if rank == 0 else 1)
    ends = [torch.empty_like(flat(model)) for _ in range(2)]
    torch.distributed.all_gather(ends, flat(model))
    assert torch.equal(*ends)


@on_ranks(2)
def test_gradients_of_the_bare_module_are_a_warning(rank):
    model, optimizer, wrapped = start(AllReduce())
    text = "gradients must come from a forward of the trainer .* call the GossipDataParallel"
    train_on(model, optimizer, batches(rank, 2), forward=wrapped)
    with pytest.warns(UserWarning, match=text) as caught:
        train_on(model, optimizer, batches(rank, 2))
    assert len(caught) == 1
    assert caught[0].filename.endswith("loops.py")
    wrapped.close()
