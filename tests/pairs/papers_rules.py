"""The algorithms' rules in plain torch, on the models of all ranks in one process.

A rule knows nothing of trainers: it reads and writes the parameters of loops (`loops.py`), as
rows of a matrix, between their backward passes, updates and next steps. ``places`` are the
parameters that are one message together.
"""

import torch
from torch.nn.utils import parameters_to_vector

from pyparallel.compression import ErrorFeedback, TopK
from pyparallel.gossip import (
    EASGD,
    OSGP,
    SGP,
    AllReduce,
    DiLoCo,
    Hierarchical,
    LeaderSGD,
    NoLoCo,
    SlowMo,
)


def start_rule(algorithm, loops, places, size=1):
    """Return the rule of an algorithm; ``size`` consecutive ranks average gradients, as one."""
    if isinstance(algorithm, Hierarchical):
        return start_rule(algorithm.inner, loops, places, algorithm.ranks_per_node)
    if isinstance(algorithm, AllReduce):
        return Rule(algorithm, loops, places, len(loops))
    kinds = {SGP: PushSum, OSGP: Overlap, LeaderSGD: Leaders, EASGD: Center}
    kind = next((r for k, r in kinds.items() if isinstance(algorithm, k)), OuterSteps)
    return kind(algorithm, loops, places, size)


def largest(rows, compressor):
    """Return rows of their largest entries and zeros; all of them without a density."""
    compressor = getattr(compressor, "compressor", compressor)  # of ErrorFeedback
    if not isinstance(compressor, TopK):
        return rows
    kept = rows.abs().topk(max(1, round(compressor.density * rows.shape[1]))).indices
    return torch.zeros_like(rows).scatter(1, kept, rows.gather(1, kept))


class Rule:
    """Ranks of a node average their gradients, and nothing else."""

    def __init__(self, algorithm, loops, places, size):
        self.of, self.loops, self.places, self.size = algorithm, loops, places, size
        self.num_nodes = len(loops) // size
        self.w = torch.ones(len(loops), 1).double()
        self.flight, self.age, self.round, self.step = None, 0, 0, 0
        self.reset()

    @property
    def x(self):
        return torch.stack([parameters_to_vector(self.of_rank(r)) for r in self.loops]).detach()

    @x.setter
    def x(self, rows):
        for loop, row in zip(self.loops, rows, strict=True):
            torch.nn.utils.vector_to_parameters(row.clone(), self.of_rank(loop))

    def of_rank(self, loop):
        return [loop.parameters[place] for place in self.places]

    def per_entry(self, value_of):
        """Return a row of what a function says of each parameter of the first rank."""
        return torch.cat([torch.full((p.numel(),), float(value_of(p)), dtype=torch.float64)
                          for p in self.of_rank(self.loops[0])])  # fmt: skip

    def over_nodes(self, matrix):
        """Return the matrix of all ranks for one of the nodes, whose ranks are equal."""
        each = torch.full((self.size, self.size), 1 / self.size).double()
        return torch.kron(torch.as_tensor(matrix).double(), each)

    def average_gradients(self):
        for first in range(0, len(self.loops), self.size):
            node = self.loops[first : first + self.size]
            for same in zip(*map(self.of_rank, node), strict=True):
                if same[0].grad is not None:
                    mean = sum(p.grad for p in same) / self.size
                    for p in same:
                        p.grad = mean.clone()

    def before(self):
        """Act after all backward passes, before the updates."""

    def after(self):
        """Act after the updates."""

    def flush(self):
        """Add what is in flight."""

    def reset(self):
        """Begin again from what all ranks have loaded; nothing is in flight."""

    def consensus(self):
        return self.x.mean(0)


class PushSum(Rule):
    """Assran et al., Algorithm 1; or combine-while-adapt; of compressed messages CHOCO-SGD's."""

    def reset(self):
        self.w.fill_(1)
        self.flight = self.replica = None

    def before(self):
        self.age += 1
        if self.age >= self.of.overlap:
            self.flush()
        self.set_weights()

    def set_weights(self):
        for loop, w in zip(self.loops, self.w, strict=True):
            loop.weight = float(w)  # the optimizer steps on w * z

    def after(self):
        if self.flight is None:
            self.send()
        if self.of.overlap == 0:
            self.flush()

    def send(self):
        mixing = torch.as_tensor(self.of.topology.mixing_matrix(self.round)).double()
        kept = mixing.diag().diag()
        others = self.over_nodes(mixing - kept)
        x = self.x
        message = x
        if getattr(self.of, "compressor", None) is not None:
            known = self.replica
            message = x if known is None else known + largest(x - known, self.of.compressor)
            self.replica = message
        sent = others.sum(0)[:, None] * self.w
        if not self.is_biased:
            x = x + (x - message) * sent / (self.w - sent)
            self.flight = others @ (self.w * message), others @ self.w
            self.w = self.w - sent
        else:
            self.flight, x = (others @ x, 0 * self.w), self.over_nodes(kept) @ x
        self.x, self.round, self.age = x, self.round + 1, 0

    @property
    def is_biased(self):
        return getattr(self.of, "biased", False)

    def flush(self):
        if self.flight is not None:
            self.add(self.flight)
            self.flight = None

    def add(self, flight):
        values, masses = flight
        z = self.w * self.x + values
        self.w = self.w + masses
        self.x = z / self.w

    def consensus(self):
        return (self.w * self.x + (0 if self.flight is None else self.flight[0])).mean(0)


class Overlap(PushSum):
    """Assran et al., Algorithm 2: send, then add what was sent before."""

    def before(self):
        self.age += 1
        self.set_weights()

    def after(self):
        if self.flight is None or self.age >= self.of.delay:
            before = self.flight
            self.send()
            if before is not None:
                self.add(before)


class OuterSteps(Rule):
    """Local SGD, SlowMo, DiLoCo and NoLoCo; what is frozen is averaged alone."""

    def __init__(self, algorithm, loops, places, size):
        inner = getattr(algorithm, "inner", None)
        self.inner = start_rule(inner or AllReduce(), loops, places, size)
        super().__init__(algorithm, loops, places, size)
        number, self.parts = int(loops[0].names[places[0]].split(".")[0]), algorithm.fragments
        self.number = number % self.parts  # of the fragment, by the layer
        self.first = (self.number + 1) * algorithm.interval // self.parts

    def reset(self):
        self.inner.reset()
        is_pairwise = isinstance(self.of, NoLoCo)  # whose slow weights are a rank's own
        self.slow = self.x if is_pairwise else self.x.mean(0).expand(len(self.loops), -1).clone()
        self.m, self.error = torch.zeros_like(self.slow), torch.zeros_like(self.slow)
        self.flight = self.outer = None

    def before(self):
        self.inner.before()

    def after(self):
        self.inner.after()
        self.step += 1
        if self.step >= self.first and (self.step - self.first) % self.of.interval == 0:
            self.inner.flush()
            self.send()
        if self.flight is not None and self.step - self.flight[0] >= self.of.delay:
            self.flush()

    def send(self):
        total = self.slow - self.x + self.error
        sent = largest(total, self.of.compressor)
        if isinstance(self.of.compressor, ErrorFeedback):
            self.error = total - sent
        if isinstance(self.of, NoLoCo):
            index = self.round * self.parts + self.number
            pairs = [self.of.topology.partner(r, index) for r in range(self.num_nodes)]
            matrix = torch.eye(self.num_nodes)
            for rank, partner in enumerate(pairs):
                matrix[rank, rank] -= (partner is not None) / 2
                matrix[rank, rank if partner is None else partner] += (partner is not None) / 2
        else:
            matrix = torch.ones(self.num_nodes, self.num_nodes) / self.num_nodes
        trained = self.per_entry(lambda p: p.requires_grad) > 0
        still = (self.slow == self.x).all(0)
        self.round += 1
        self.flight = self.step, self.over_nodes(matrix), sent, trained, still

    def flush(self):
        self.inner.flush()
        if self.flight is None:
            return
        _, mean, sent, trained, still = self.flight
        average, mix = self.slow - mean @ sent, self.of.share_kept
        new = self.step_outer(average, mean, sent, trained)
        if not isinstance(self.of, NoLoCo):
            new = torch.where(trained, new, torch.where(still, self.slow, average))
        self.slow, self.flight = new, None
        self.x = torch.where(trained, mix * self.x + (1 - mix) * new, new)

    def step_outer(self, average, mean, sent, trained):
        if isinstance(self.of, SlowMo):
            lr = self.loops[0].optimizers[0].param_groups[0]["lr"]
            self.m = self.of.momentum * self.m + (self.slow - average) / lr
            for loop in self.loops if self.of.reset_momentum else ():
                for optimizer in loop.optimizers:
                    for state in optimizer.state.values():
                        if state.get("momentum_buffer") is not None:
                            state["momentum_buffer"].zero_()
            return self.slow - self.of.outer_lr * lr * self.m
        if isinstance(self.of, NoLoCo):
            pull = self.of.pull * (self.slow - mean @ self.slow)
            change = self.of.outer_lr * (mean @ sent) + pull
            self.m = self.of.momentum * self.m * trained - change
            return self.slow + self.m
        if isinstance(self.of, DiLoCo):
            if self.outer is None:
                self.theta = self.slow[0].clone().requires_grad_()
                self.outer = self.of.outer_optimizer([self.theta])
            self.theta.data.copy_(self.slow[0])
            self.theta.grad = (self.slow - average)[0]
            self.outer.step()
            return self.theta.detach().expand_as(self.slow).clone()
        return average

    def consensus(self):
        if isinstance(self.of, DiLoCo | NoLoCo):
            return self.slow.mean(0)
        return self.inner.consensus()


class Leaders(Rule):
    """Teng et al.: pulls towards the rank of the lowest loss, of the node and of all."""

    def reset(self):
        self.leaders = {"global": None, "local": None}

    def before(self):
        x, rates = self.x, self.per_entry(self.loops[0].rate_of)
        self.pull = torch.zeros_like(x)
        for name, leader in self.leaders.items():
            if leader is not None:
                self.pull += rates * (getattr(self.of, f"{name}_strength") or 0.0) * (leader - x)

    def after(self):
        x, self.step = self.x + self.pull, self.step + 1
        size, n, interval = self.of.ranks_per_node, self.num_nodes, self.of.interval
        intervals = {"local": interval, "global": self.of.global_interval}
        for name, leader in self.leaders.items():
            if leader is not None:
                x = x + (getattr(self.of, f"{name}_drift") or 0) / intervals[name] * (leader - x)
        losses = torch.tensor([loop.losses[-interval:] for loop in self.loops]).double()
        losses = losses.mean(1).view(n, self.size).mean(1)
        groups = {"local": size if size > 1 else 0, "global": n if size < n else 0}
        for name, count in groups.items():
            if count and self.step % interval == 0 and self.step % intervals[name] == 0:
                of_groups = losses.view(-1, count).argmin(1) + torch.arange(0, n, count)
                self.leaders[name] = x[of_groups * self.size].repeat_interleave(
                    count * self.size, 0
                )
                x = x + (getattr(self.of, f"{name}_pull") or 0) * (self.leaders[name] - x)
        self.x = x


class Center(Rule):
    """Zhang et al.: pulls towards a center, which is pulled towards the mean."""

    def reset(self):
        self.center, self.pull = self.x.mean(0), 0

    def after(self):
        self.x, self.pull, self.step = self.x - self.pull, 0, self.step + 1
        if self.step % self.of.interval == 0:
            self.pull = self.of.beta / len(self.loops) * (self.x - self.center)
            self.center = self.center + self.of.beta * (self.x.mean(0) - self.center)

    def consensus(self):
        return self.center
