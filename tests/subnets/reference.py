"""Independent subnetwork training of an MLP by one process, written out: masks on a whole model."""

import copy

import torch
from torch import nn


def train_masked(model, batches, partition, interval, num, *, lr, momentum):
    """Train Linear, activation, Linear, activation, Linear as ``num`` ranks would.

    Args:
        model: trained in place.
        batches: for each step a list of (inputs, targets), one for each rank.
        partition: draws; widths "0" and "2".
        interval: steps between merges; a tail is merged too.
        num: ranks.
        lr: of SGD.
        momentum: of SGD, carried with the weights.
    """
    widths = partition.widths(model)
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for round_index, begin in enumerate(range(0, len(batches), interval)):
        draw = partition.draw(widths, round_index, num)
        trained = []
        for rank in range(num):
            kept = {name: pieces[rank] for name, pieces in draw.items()}
            mine = copy.deepcopy(model), copy.deepcopy(velocity)
            for step in batches[begin : begin + interval]:
                _step(*mine, kept, step[rank], lr, momentum)
            trained.append((kept, dict(mine[0].named_parameters()), mine[1]))
        _merge(dict(model.named_parameters()), velocity, trained)


def _step(model, velocity, kept, batch, lr, momentum):
    inputs, targets = batch
    x = inputs
    for first, act, name in ((0, 1, "0"), (2, 3, "2")):
        mask = torch.zeros(model[first].out_features, dtype=x.dtype)
        mask[kept[name]] = 1
        x = model[act](model[first](x)) * mask
    loss = nn.functional.mse_loss(model[4](x), targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
            velocity[name].mul_(momentum).add_(gradient)
            p.sub_(velocity[name], alpha=lr)


@torch.no_grad()
def _merge(whole, velocity, trained):
    whole["4.bias"].copy_(sum(p["4.bias"] for _, p, _ in trained) / len(trained))
    velocity["4.bias"].copy_(sum(v["4.bias"] for *_, v in trained) / len(trained))
    for kept, parameters, velocities in trained:
        first, second = kept["0"], kept["2"]
        blocks = {
            "0.weight": (first,),
            "0.bias": (first,),
            "2.weight": (second[:, None], first),
            "2.bias": (second,),
            "4.weight": (slice(None), second),
        }
        for name, block in blocks.items():
            whole[name][block] = parameters[name][block]
            velocity[name][block] = velocities[name][block]
