"""Reference training of subnets in one process, with masks and full-size optimizer state."""

import torch
from torch import nn

# By layer: hidden dimension of its outputs, repetitions of it, and hidden dimension of its inputs.
DimLayout = dict[str, tuple[str | None, int, str | None]]

MLP_LAYOUT: DimLayout = {"0": ("0", 1, None), "2": ("2", 1, "0"), "4": (None, 1, "2")}


def smooth_mlp(first, second, bias=True):
    """Return an MLP without ReLU, so that no gradient is zero."""
    return nn.Sequential(
        nn.Linear(5, first, bias=bias),
        nn.Tanh(),
        nn.Linear(first, second, bias=bias),
        nn.Tanh(),
        nn.Linear(second, 3, bias=bias),
    ).double()


def block_of(shape, dims):
    """Return a bool mask of the entries whose indices are all among those given by dimension."""
    block = torch.ones(shape, dtype=torch.bool)
    for dim, chosen in dims.items():
        line = torch.zeros(shape[dim], dtype=torch.bool)
        line[chosen] = True
        block &= line.view(-1, *[1] * (len(shape) - dim - 1))
    return block


def entries(kept, units, length, blocks=1):
    """Return the indices of units along a dimension of this length."""
    return torch.arange(length).view(blocks, units, -1)[:, kept].flatten()


def blocks_of(model, layout, kept, units):
    """Return a mask of a subnet's entries, by parameter.

    Args:
        model: the full model.
        layout: where hidden dimensions dims.
        kept: the subnet's units, by hidden dimension.
        units: number of units, by hidden dimension.
    """
    found = {}
    for name, parameter in model.named_parameters():
        out, blocks, into = layout.get(name.rpartition(".")[0], (None, 1, None))
        dims = {}
        if out is not None:
            dims[0] = entries(kept[out], units[out], parameter.shape[0], blocks)
        if into is not None and parameter.dim() > 1:
            dims[1] = entries(kept[into], units[into], parameter.shape[1])
        found[name] = block_of(parameter.shape, dims)
    return found


def mask_units(model, layout, kept, units):
    """Zero the inputs of consumers for all units except ``kept``; return the hooks' handles."""

    def masking(layer, width):
        def hook(module, inputs):
            (x,) = inputs
            dim = x.dim() - 1 if isinstance(layer, nn.Linear) else 1
            mask = torch.zeros(x.shape[dim], dtype=x.dtype)
            mask[entries(kept[width], units[width], x.shape[dim])] = 1
            return (x * mask.view(-1, *[1] * (x.dim() - dim - 1)),)

        return layer.register_forward_pre_hook(hook)

    layers = [(model.get_submodule(name), into) for name, (_, _, into) in layout.items()]
    return [masking(layer, into) for layer, into in layers if into is not None]


class Momentum:
    """SGD with momentum, elementwise."""

    keys = ("momentum_buffer",)

    def __init__(self, lr, momentum):
        self.lr, self.momentum = lr, momentum

    def make(self, parameters):
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)

    def step(self, weight, state, gradient, count):
        buffer = self.momentum * state["momentum_buffer"] + gradient
        return weight - self.lr * buffer, {"momentum_buffer": buffer}


class AdamW:
    """AdamW with torch's betas and eps, elementwise."""

    keys = ("exp_avg", "exp_avg_sq")

    def __init__(self, lr, decay):
        self.lr, self.decay = lr, decay

    def make(self, parameters):
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.decay)

    def step(self, weight, state, gradient, count):
        mean = 0.9 * state["exp_avg"] + 0.1 * gradient
        square = 0.999 * state["exp_avg_sq"] + 0.001 * gradient.square()
        denominator = (square / (1 - 0.999**count)).sqrt() + 1e-8
        weight = weight * (1 - self.lr * self.decay)
        weight = weight - self.lr * mean / (1 - 0.9**count) / denominator
        return weight, {"exp_avg": mean, "exp_avg_sq": square}


def train_together(model, layout, draws, batches, interval, rule):
    """Train as this number of ranks would, each entry with its own state in whichever subnet it is.

    Args:
        model: trained in place.
        layout: where hidden dimensions dims.
        draws: for each round the units of each rank, by hidden dimension; ranks may share some.
        batches: for each step the (inputs, targets) of each rank; the last steps are merged too.
        interval: steps between merges.
        rule: the optimizer.

    Returns:
        the final state, by parameter and key.
    """
    num = len(batches[0])
    units = {name: len(torch.cat(pieces).unique()) for name, pieces in draws[0].items()}
    state = {
        name: {key: torch.zeros_like(p) for key in rule.keys}
        for name, p in model.named_parameters()
    }
    begun = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for round_index, begin in enumerate(range(0, len(batches), interval)):
        results = []
        for rank in range(num):
            kept = {name: pieces[rank] for name, pieces in draws[round_index].items()}
            blocks = blocks_of(model, layout, kept, units)
            mine = {name: (w, state[name]) for name, w in begun.items()}
            handles = mask_units(model, layout, kept, units)
            for count in range(begin + 1, min(begin + interval, len(batches)) + 1):
                inputs, targets = batches[count - 1][rank]
                _load(model, {name: w for name, (w, _) in mine.items()})
                loss = nn.functional.mse_loss(model(inputs), targets)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                for name, gradient in zip(mine, gradients, strict=True):
                    mine[name] = rule.step(*mine[name], gradient, count)
            for handle in handles:
                handle.remove()
            results.append((blocks, mine))
        for name, before in begun.items():
            begun[name] = _merged(before, [(b[name], m[name][0]) for b, m in results])
            for key in rule.keys:
                parts = [(b[name], m[name][1][key]) for b, m in results]
                state[name][key] = _merged(state[name][key], parts)
    _load(model, begun)
    return state


def _merged(before, parts):
    """Return the average of each entry over the subnets that have it; of none, as before."""
    holders = sum(block.to(before.dtype) for block, _ in parts)
    total = sum(torch.where(block, values, 0) for block, values in parts)
    return torch.where(holders > 0, total / holders.clamp(min=1), before)


@torch.no_grad()
def _load(model, weights):
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
