"""The rules of the papers, rank after rank in plain loops; they share nothing with the simulator.

Each function returns z of all ranks, (n, d), after the steps. ``gradient(i, z, step)`` is that of
rank i, (d,), in a step counted from 0.
"""

import numpy as np


def all_reduce(gradient, n, d, lr, steps):
    x = np.zeros(d)
    for step in range(steps):
        x = x - lr * sum(gradient(i, x, step) for i in range(n)) / n
    return np.tile(x, (n, 1))


class PushSum:
    """SGP and Overlap SGP of Assran et al.: numerators x and weights w, and messages in flight."""

    def __init__(self, topology, lr, gradient, d, *, overlap=0, delay=0, biased=False):
        self.topology, self.lr, self.gradient, self.n = topology, lr, gradient, topology.num_ranks
        self.overlap, self.delay, self.biased = overlap, delay, biased
        self.x, self.w = [np.zeros(d) for _ in range(self.n)], [1.0] * self.n
        self.in_flight, self.rounds, self.sent_at = None, 0, 0

    def step(self, step):
        slopes = [self.gradient(i, self.z(i), step) for i in range(self.n)]
        if self.overlap and self.in_flight and step - self.sent_at >= self.overlap:
            self.merge()  # combine while adapt: just before the update
        for i in range(self.n):
            self.x[i] = self.x[i] - self.lr * slopes[i]
        if self.delay:
            if step % self.delay == 0:  # Algorithm 2
                before, self.in_flight = self.in_flight, None
                self.send(step)
                if before:
                    self.in_flight, now = before, self.in_flight
                    self.merge()
                    self.in_flight = now
        elif self.in_flight is None:
            self.send(step)
            if self.overlap == 0:  # Algorithm 1
                self.merge()

    def z(self, i):
        return self.x[i] / (1 if self.biased else self.w[i])

    def send(self, step):
        shares = self.topology.mixing_matrix(self.topology.equivalent_round(self.rounds))
        self.rounds, self.sent_at = self.rounds + 1, step
        self.in_flight = [(shares[j, i], i, j, self.x[i], self.w[i]) for i in range(self.n)
                          for j in range(self.n) if i != j and shares[j, i]]  # fmt: skip
        for i in range(self.n):
            self.x[i], self.w[i] = shares[i, i] * self.x[i], shares[i, i] * self.w[i]

    def merge(self):
        for share, _, j, x, w in self.in_flight or ():
            self.x[j], self.w[j] = self.x[j] + share * x, self.w[j] + share * w
        self.in_flight = None

    def all_z(self):
        return np.array([self.z(i) for i in range(self.n)])


def push_sum(gradient, topology, d, lr, steps, **options):
    run = PushSum(topology, lr, gradient, d, **options)
    for step in range(steps):
        run.step(step)
    run.merge()
    return run.all_z()


def hierarchical(gradient, topology, per_node, d, lr, steps, **options):
    """SGP between nodes: the gradient of a node is the mean over its ranks, at equal weights."""

    def of_node(node, z, step):
        ranks = range(node * per_node, (node + 1) * per_node)
        return sum(gradient(i, z, step) for i in ranks) / per_node

    return push_sum(of_node, topology, d, lr, steps, **options).repeat(per_node, 0)


class Alone:
    """Ranks that only train, in the form of push-sum."""

    merge, z, all_z, biased = PushSum.merge, PushSum.z, PushSum.all_z, False

    def __init__(self, n, lr, gradient, d):
        self.n, self.lr, self.gradient, self.in_flight = n, lr, gradient, None
        self.x, self.w = [np.zeros(d) for _ in range(n)], [1.0] * n

    def step(self, step):
        self.x = [x - self.lr * self.gradient(i, x, step) for i, x in enumerate(self.x)]


def slowmo(run, interval, momentum, outer_lr, steps):
    """Algorithm 1 of Wang et al. around a run of push-sum: lines 6 to 8 at each interval."""
    x0, u, lr = np.zeros_like(run.x[0]), 0.0, run.lr
    for step in range(steps):
        run.step(step)
        if (step + 1) % interval == 0:
            run.merge()
            average = sum(run.x) / run.n  # exact: the weights sum to n
            u = momentum * u + (x0 - average) / lr
            x0 = x0 - outer_lr * lr * u
            run.x = [(1 if run.biased else w) * x0 for w in run.w]
    run.merge()
    return run.all_z()


def streaming(gradient, n, d, lr, steps, interval, outer, *, fragments=1, delay=0, mix=0.0):
    """Streaming DiLoCo, Algorithm 2 of Douillard et al.; with one fragment DiLoCo.

    ``outer(theta, average, state)`` returns the weights after an outer step of a fragment.
    """
    x = np.zeros((n, d))
    anchors, states, due = np.zeros(d), [{} for _ in range(fragments)], {}

    def take(p):
        entries = [j for j in range(d) if j % fragments == p]
        new = outer(anchors[entries], due.pop(p)[1], states[p])
        anchors[entries] = new
        for i in range(n):
            x[i, entries] = (1 - mix) * new + mix * x[i, entries]

    for t in range(1, steps + 1):
        for i in range(n):
            x[i] = x[i] - lr * gradient(i, x[i], t - 1)
        for p in range(fragments):
            first = (p + 1) * interval // fragments
            if t >= first and (t - first) % interval == 0:
                due[p] = t, sum(x[i, p::fragments] for i in range(n)) / n
            if p in due and t - due[p][0] >= delay:
                take(p)
    for p in list(due):
        take(p)
    return x


def average_alone(theta, average, state):
    return average


def nesterov(outer_lr, momentum=0.9):
    """DiLoCo's outer step: Sutskever's form, as PyTorch writes it."""

    def outer(theta, average, state):
        change = theta - average
        state["m"] = momentum * state["m"] + change if "m" in state else change
        return theta - outer_lr * (change + momentum * state["m"])

    return outer


def noloco(gradient, topology, d, lr, steps, interval, *, momentum, outer_lr, pull,
           fragments=1, delay=0, mix=0.0):  # fmt: skip
    """Eq. 1 to 3 of Kolehmainen et al., with pairs of ``topology``; one of an odd number alone."""
    n = topology.num_ranks
    x, phi, delta, due = np.zeros((n, d)), np.zeros((n, d)), np.zeros((n, d)), {}

    def take(p):
        _, sent, pairs = due.pop(p)
        entries = slice(p, None, fragments)
        held = phi.copy()
        for i, peer in enumerate(pairs):
            group = [i] if peer is None else [i, peer]
            change = sum(sent[k] - held[k, entries] for k in group) / len(group)
            apart = held[i, entries] - sum(held[k, entries] for k in group) / len(group)
            delta[i, entries] = momentum * delta[i, entries] + outer_lr * change - pull * apart
            phi[i, entries] += delta[i, entries]
            x[i, entries] = (1 - mix) * phi[i, entries] + mix * x[i, entries]

    for t in range(1, steps + 1):
        for i in range(n):
            x[i] = x[i] - lr * gradient(i, x[i], t - 1)
        for p in range(fragments):
            first = (p + 1) * interval // fragments
            if t >= first and (t - first) % interval == 0:
                index = (t - first) // interval * fragments + p
                pairs = [topology.partner(i, index) for i in range(n)]
                due[p] = t, x[:, p::fragments].copy(), pairs
            if p in due and t - due[p][0] >= delay:
                take(p)
    for p in list(due):
        take(p)
    return x
