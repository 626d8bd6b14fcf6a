"""A reference of pipeline training in one process, from the papers' rules and a full history.

Slow and plain on purpose: every version of every stage is kept, and microbatches run one by one. Of
pyparallel only the names of schedules and corrections are used; the rules are written out again.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from pyparallel.pipeline import (
    GPipe,
    Interleaved,
    Nesterov,
    NoPrediction,
    OneForwardOneBackward,
    PipeDream,
    PipeDream2BW,
    PipeMare,
    PipeOptim,
    Schedule,
    SpecTrain,
    StageMomentum,
    UpdateErrorFeedback,
    XPipe,
    ZeroBubble,
)

Call = tuple[Tensor, Tensor]  # inputs, target
Weights = dict[str, Tensor]
Value = Tensor | tuple[Tensor, ...]  # what layers return
OptimizerFactory = Callable[..., Optimizer | list[Optimizer]]
Weigh = Callable[[Tensor], float]  # a microbatch's loss, by its target


class Read(NamedTuple):
    """A version of a stage, counted from the last flush, and the horizon of the prediction.

    A horizon below 0 recomputes earlier weights.
    """

    version: int
    horizon: int = 0


def reads(
    schedule: Schedule,
    microbatch: int,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    updates_before: int = 0,
) -> tuple[Read, Read]:
    """Return what the forward and backward of a microbatch read on a stage.

    The synchronous updates of a run, of which some may come before the last flush, read the newest
    weights; what comes after them is as after a flush.
    """
    every = microbatches_per_update(schedule, num_microbatches)
    start = max(0, getattr(schedule, "synchronous_updates", 0) - updates_before)
    if microbatch < start * every:
        newest = Read(microbatch // every)
        return newest, newest
    rule = streaming_reads(
        schedule, microbatch - start * every, stage, num_stages, num_microbatches
    )
    forward, backward = (Read(start + each.version, each.horizon) for each in rule)
    return forward, backward


def streaming_reads(
    schedule: Schedule, microbatch: int, stage: int, num_stages: int, num_microbatches: int
) -> tuple[Read, Read]:
    """Return what the forward and backward of a microbatch read on a stage, by the papers' rules.

    In 1F1B a stage has done max(0, m - (D - 1 - s)) backwards before the forward of microbatch m,
    and m before its backward.
    """
    delay = num_stages - 1 - stage
    in_flight = min(microbatch, delay)
    then, now = microbatch - in_flight, microbatch  # updates before the forward, the backward
    call = microbatch // num_microbatches
    match schedule:
        case GPipe() | OneForwardOneBackward() | Interleaved() | ZeroBubble():
            forward = backward = Read(call)
        case PipeMare(decay=None) | Nesterov(weights="live"):
            forward, backward = Read(then), Read(now)
        case PipeMare():
            forward, backward = Read(then), Read(now, -in_flight)
        case PipeDream() | Nesterov(weights="consistent"):
            forward = backward = Read(then)
        case PipeDream2BW():
            lag = updates_late(schedule, stage, num_stages, num_microbatches)
            forward = backward = Read(max(0, call - lag))
            if schedule.prediction != NoPrediction():
                forward = backward = Read(forward.version, call - forward.version)
            if schedule.weights == "live":
                backward = Read(call)
        case SpecTrain(variant=1):
            forward, backward = Read(then, in_flight + stage // 2), Read(now, stage // 2)
        case SpecTrain(variant=2) | PipeOptim(weights="consistent"):
            forward = backward = Read(then, in_flight)
        case PipeOptim(weights="live"):
            forward, backward = Read(then, in_flight), Read(now)
        case XPipe(weights=mode):
            first_forward = max(0, call * num_microbatches - delay) // num_microbatches
            forward = Read(first_forward, call - first_forward)
            backward = forward if mode == "consistent" else Read(call)
        case _:
            raise NotImplementedError(f"no rule for {schedule!r}")
    return forward, backward


def microbatches_per_update(schedule: Schedule, num_microbatches: int) -> int:
    each = PipeDream, PipeMare, Nesterov, SpecTrain, PipeOptim
    return 1 if isinstance(schedule, each) else num_microbatches


@dataclass
class Version:
    """The weights of a stage after some updates, with the optimizers as they were then."""

    parameters: dict[str, nn.Parameter]
    optimizers: list[Optimizer]
    count: int = 0  # of updates, never restarted
    change: Weights = field(default_factory=dict)  # by an update, on average
    updates: Weights = field(default_factory=dict)  # what the optimizers subtracted last
    corrected: Weights = field(default_factory=dict)  # the same with the correction

    def weights(self) -> Weights:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def after(self, gradients: Weights, correction: "Correction") -> "Version":
        """Return the version one update later; synchronous updates are not corrected."""
        if self.count < correction.start:
            correction = replace(correction, given=None)
        new = copy.deepcopy(replace(self, change={}, updates={}, corrected={}))
        new.change, new.updates, new.corrected = (
            dict(each) for each in (self.change, self.updates, self.corrected)
        )
        for name, parameter in new.parameters.items():
            parameter.grad = gradients.get(name)
        with correction.applied(new):
            for optimizer in new.optimizers:
                step_at(optimizer, correction.annealed_rate(self.count))
        for name, before in self.weights().items():
            if name in gradients and self.count >= correction.start:
                new.updates[name] = before - new.weights()[name]
                late = new.updates[name] - self.updates.get(name, new.updates[name])
                new.parameters[name].data.sub_(correction.feedback * late)
            new.corrected[name] = before - new.weights()[name]
        new.count += 1
        for name, before in self.weights().items():
            moved, average = new.weights()[name] - before, self.change.get(name, 0)
            new.change[name] = correction.decay * average + (1 - correction.decay) * moved
        return new

    def stepped(self) -> Iterator[tuple[str, dict, dict, Tensor]]:
        """Yield the name, group, state and gradient of each parameter of the last update."""
        for optimizer in self.optimizers:
            groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in self.parameters.items():
                if id(parameter) in groups and parameter.grad is not None:
                    state = optimizer.state[parameter]
                    yield name, groups[id(parameter)], state, parameter.grad


def step_at(optimizer: Optimizer, factor: float) -> None:
    """Step at a multiple of the learning rates."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


Rates = Callable[[int], float]  # the learning rate's factor after so many updates


@dataclass
class Correction:
    """What changes a stage's updates: its delay, learning rates by their number, and PipeMare's.

    PipeMare (Yang et al., MLSys 2021) has the rate over a power of the delay (T1), and the averaged
    change of the weights (T2), from which the backward recomputes earlier weights.

    Args:
        schedule: PipeMare or another one.
        delay: updates between a microbatch's forward and its update, as PipeMare counts them.
        given: the correction of delayed gradients.
        delayed_by: updates by which they are delayed, of all schedules.
        depth: number of stages.
        rates: of a learning-rate scheduler.
        start: synchronous updates of the run.
    """

    schedule: Schedule
    delay: int
    given: UpdateErrorFeedback | StageMomentum | None = None
    delayed_by: int = 0
    depth: int = 1
    rates: Rates = field(default=lambda count: 1.0)
    start: int = 0

    def annealed_rate(self, count: int) -> float:
        annealing, streamed = getattr(self.schedule, "annealing", 0), count - self.start
        if not (annealing and self.delay) or streamed < 0:
            return 1.0
        return self.delay ** -(1 - min(streamed / annealing, 1))

    @property
    def decay(self) -> float:
        """Return the decay of one update, which to the power of the delay is the schedule's."""
        total = getattr(self.schedule, "decay", None)
        return total ** (1 / self.delay) if total and self.delay else 0.0

    @property
    def feedback(self) -> float:
        """Return the coefficient of what an update adds to the last one."""
        match self.given:
            case UpdateErrorFeedback(coefficient=None):
                return float(self.delayed_by)
            case UpdateErrorFeedback(coefficient=coefficient) if self.delayed_by:
                return coefficient
        return 0.0

    def momentum(self, own: float) -> float:
        """Return a stage's momentum: on the way to a limit by its share of the stages."""
        if isinstance(self.given, StageMomentum):
            return own + self.delayed_by * (self.given.limit - own) / self.depth
        return own

    @contextmanager
    def applied(self, version: Version) -> Iterator[None]:
        """Give a version's groups the rate and the momentum of their next step inside."""
        groups = [group for each in version.optimizers for group in each.param_groups]
        before = [dict(group) for group in groups]
        for group in groups:
            group["lr"] *= self.rates(version.count)
            if "betas" in group:
                group["betas"] = self.momentum(group["betas"][0]), *group["betas"][1:]
            elif group.get("momentum"):
                group["momentum"] = self.momentum(group["momentum"])
        yield
        for group, values in zip(groups, before, strict=True):
            group.update(values)


def updates_late(schedule: Schedule, stage: int, depth: int, num_microbatches: int) -> int:
    """Return by how many updates a stage's gradients are delayed once the pipeline is full."""
    match schedule:
        case PipeDream2BW():
            return math.ceil((depth - 1) / num_microbatches)
        case XPipe():
            return math.ceil((depth - 1 - stage) / num_microbatches)
        case PipeDream() | PipeOptim() | SpecTrain() | PipeMare() | Nesterov():
            return depth - 1 - stage
    return 0


Prediction = Callable[[Version, int], Weights]


def predict(version: Version, horizon: int) -> Weights:
    """Predict ``horizon`` steps equal to the last one (Guan et al., arXiv 2312.00839)."""
    ahead = version.weights()
    for name, group, state, gradient in version.stepped():
        if "ns_steps" in group or ("betas" in group and "eps" not in group):  # Muon, Lion
            ahead[name] = ahead[name] - horizon * version.corrected[name]
        elif "momentum_decay" in group:
            ahead[name] = ahead[name] - group["lr"] * next_nadam_steps(horizon, group, state)
        else:
            ahead[name] = ahead[name] - group["lr"] * horizon * last_step(group, state, gradient)
    return ahead


def repeat_last_update(version: Version, horizon: int) -> Weights:
    """Predict by what the last update subtracted, whatever the optimizers are."""
    stepped = {name for name, *_ in version.stepped()}
    return {
        name: weight - horizon * version.corrected[name] if name in stepped else weight
        for name, weight in version.weights().items()
    }


def roll_out(persistence: float, version: Version, horizon: int) -> Weights:
    """Predict SGD with momentum on gradients that are a multiple of the last one."""
    ahead = version.weights()
    for name, group, state, gradient in version.stepped():
        momentum = state["momentum_buffer"]
        for _ in range(horizon):
            momentum = group["momentum"] * momentum + persistence * gradient
            ahead[name] = ahead[name] - group["lr"] * momentum
    return ahead


def last_step(group: dict, state: dict, gradient: Tensor) -> Tensor:
    """Return an optimizer's last step on a parameter, without the learning rate."""
    match group:
        case {"betas": (beta1, beta2), "eps": eps}:  # Adam, AdamW; the decay is not predicted
            count = int(state["step"])
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            return mean / (1 - beta1**count) / ((square / (1 - beta2**count)).sqrt() + eps)
        case {"momentum": momentum, "dampening": _}:  # SGD
            return state["momentum_buffer"] if momentum else gradient
    raise NotImplementedError(f"no rule for {sorted(group)}")


def next_nadam_steps(horizon: int, group: dict, state: dict) -> Tensor:
    """Return NAdam's next steps for constant gradients, without the learning rate (Dozat, 2016).

    Such a gradient is the unbiased first moment, and stays it.
    """
    (beta1, beta2), done = group["betas"], int(state["step"])
    gradient = state["exp_avg"] / (1 - beta1**done)
    scale = (state["exp_avg_sq"] / (1 - beta2**done)).sqrt() + group["eps"]

    def momentum(count: int) -> float:
        return beta1 * (1 - 0.96 ** (count * group["momentum_decay"]) / 2)

    def product(count: int) -> float:
        return math.prod(momentum(each) for each in range(1, count + 1))

    total = torch.zeros_like(gradient)
    for t in range(done + 1, done + horizon + 1):
        mean = (1 - beta1**t) * gradient
        own = (1 - momentum(t)) / (1 - product(t)) * gradient
        total = total + (own + momentum(t + 1) / (1 - product(t + 1)) * mean) / scale
    return total


@dataclass
class Pass:
    """A microbatch on a stage, between forward and backward."""

    inputs: Value
    outputs: Value
    leaves: Weights


def copied(value: Value) -> Value:
    """Return a detached copy, as another process would receive it."""
    if isinstance(value, tuple):
        return tuple(copied(part) for part in value)
    return value.detach().clone().requires_grad_(value.is_floating_point())


def parts(value: Value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass
class Stage:
    """A part of the model, its versions since the last flush, and the earlier ones."""

    module: nn.Module
    history: list[Version]
    prediction: Prediction
    correction: Correction
    gradients: Weights = field(default_factory=dict)
    skips_update: bool = False  # a microbatch of the update has no gradient
    past: list[Version] = field(default_factory=list)
    squared_norms: list[float] = field(default_factory=lambda: [0.0])  # after each of the history

    def read(self, read: Read) -> Weights:
        version = self.history[read.version]
        if read.horizon > 0:
            with self.correction.applied(version):
                return self.prediction(version, read.horizon)
        weights = version.weights()
        if read.horizon == 0:
            return weights
        return {name: w + read.horizon * version.change.get(name, 0) for name, w in weights.items()}

    def forward(self, read: Read, value: Value) -> Pass:
        leaves = {name: w.clone().requires_grad_() for name, w in self.read(read).items()}
        return Pass(value, functional_call(self.module, leaves, (value,)), leaves)

    def backward(self, done: Pass, read: Read, gradients: Sequence[Tensor | None]) -> None:
        """Run a backward that reads the weights of ``read``, and the forward's activations."""
        for name, weight in self.read(read).items():
            done.leaves[name].data.copy_(weight)  # in place, unseen by autograd's version counters
        pairs = zip(parts(done.outputs), gradients, strict=True)
        pairs = [(o, g) for o, g in pairs if o.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        for name, leaf in done.leaves.items():
            if leaf.grad is not None:
                before = self.gradients.get(name)
                self.gradients[name] = leaf.grad if before is None else before + leaf.grad

    def clip(self, norm: float, max_norm: float) -> None:
        factor = min(1.0, max_norm / (norm + 1e-6))
        self.gradients = {name: factor * each for name, each in self.gradients.items()}

    def update(self) -> None:
        last = self.history[-1]
        new = last if self.skips_update else last.after(self.gradients, self.correction)
        self.history.append(new)
        self.gradients, self.skips_update = {}, False

    def flush(self) -> None:
        self.past += self.history[:-1]
        self.history = self.history[-1:]
        self.squared_norms = self.squared_norms[-1:]

    def state(self) -> Weights:
        """Return the newest weights and the buffers."""
        return {**self.module.state_dict(), **self.history[-1].weights()}


def cut(layers: Sequence[nn.Module], split: Sequence[int]) -> list[nn.Sequential]:
    """Return stages whose layers keep their names in the whole model."""
    named = [(str(index), layer) for index, layer in enumerate(layers)]
    edges = pairwise([0, *split, len(layers)])
    return [nn.Sequential(OrderedDict(named[begin:end])) for begin, end in edges]


def make_stage(
    module: nn.Module,
    optimizer_fn: OptimizerFactory,
    prediction: Prediction,
    correction: Correction,
) -> Stage:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    parameters = {name: nn.Parameter(p.detach().clone()) for name, p in trained.items()}
    made = optimizer_fn(list(parameters.values())) if parameters else []
    optimizers = made if isinstance(made, list) else [made]
    return Stage(module, [Version(parameters, optimizers)], prediction, correction)


def microbatches(
    calls: Sequence[Call], num_microbatches: int, per_update: int, weigh: Weigh = len
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield the inputs and target of each microbatch, and its fraction of its update's weight."""
    for call in calls:
        for inputs, target in zip(*(t.tensor_split(num_microbatches) for t in call), strict=True):
            total = weigh(call[1]) if per_update > 1 else weigh(target)
            yield inputs, target, weigh(target) / total


@dataclass
class Trained:
    """The loss of every step, and the trained stages."""

    losses: list[float]
    stages: list[Stage]

    @property
    def state(self) -> Weights:
        """Return the state of the whole model."""
        return {name: value for stage in self.stages for name, value in stage.state().items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread as ranks do: the order of sums depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def train_in_one_process(
    build_layers: Callable[[], Sequence[nn.Module]],
    split: Sequence[int],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer_fn: OptimizerFactory,
    schedule: Schedule,
    streams: Sequence[Sequence[Call]],
    num_microbatches: int,
    prediction: Prediction = predict,
    correction: UpdateErrorFeedback | StageMomentum | None = None,
    rates: Rates = lambda count: 1.0,
    max_norm: float | None = None,
    weigh: Weigh = len,
) -> Trained:
    """Train as a pipeline that is flushed after each stream of steps.

    ``weigh``: the weight of a microbatch's loss, of its target; it must be additive.
    """
    every, depth = microbatches_per_update(schedule, num_microbatches), len(split) + 1
    start = getattr(schedule, "synchronous_updates", 0)
    stages = []
    for index, module in enumerate(cut(build_layers(), split)):
        late = updates_late(schedule, index, depth, num_microbatches)
        own = Correction(schedule, depth - 1 - index, correction, late, depth, rates, start)
        stages.append(make_stage(module, optimizer_fn, prediction, own))
    losses: list[float] = []
    updates = 0
    for calls in streams:
        of_microbatches = []
        for m, batch in enumerate(microbatches(calls, num_microbatches, every, weigh)):
            rules = [reads(schedule, m, s, depth, num_microbatches, updates) for s in range(depth)]
            of_microbatches.append(run_microbatch(stages, rules, loss_fn, *batch))
            if (m + 1) % every == 0:
                if max_norm is not None:
                    clip_by_last_norms(stages, m, every, num_microbatches * len(calls), max_norm)
                for stage in stages:
                    stage.update()
        for stage in stages:
            stage.flush()
        updates += len(calls) * num_microbatches // every
        losses += losses_of_calls(of_microbatches, calls, num_microbatches, weigh)
    return Trained(losses, stages)


def clip_by_last_norms(
    stages: Sequence[Stage], microbatch: int, every: int, total: int, max_norm: float
) -> None:
    """Clip the gradients of an update that ends with a microbatch, on all stages.

    Each stage clips by the norm of: the gradients of this update on it and on later stages; and on
    each earlier stage, of the last update that it had done before the newest of its forwards of
    which this stage has run the forward. (0: before the first one.)
    """
    depth = len(stages)
    squares = [sum(g.square().sum().item() for g in s.gradients.values()) for s in stages]
    for index, stage in enumerate(stages):
        newest = min(microbatch + depth - 1 - index, total - 1)
        square = sum(squares[index:])
        for number, earlier in enumerate(stages[:index]):
            backwards = max(0, newest - (depth - 1 - number))
            square += earlier.squared_norms[backwards // every]
        stage.clip(math.sqrt(square), max_norm)
    for stage, square in zip(stages, squares, strict=True):
        stage.squared_norms.append(stage.squared_norms[-1] if stage.skips_update else square)


def run_microbatch(
    stages: Sequence[Stage],
    rules: Sequence[tuple[Read, Read]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    target: Tensor,
    share: float,
) -> float:
    """Run the forwards and backwards of all stages; return the loss.

    Without a finite loss there are no backwards, and no update with this microbatch.
    """
    passes = []
    value = inputs.detach()
    for stage, (forward, _) in zip(stages, rules, strict=True):
        passes.append(stage.forward(forward, value))
        value = copied(passes[-1].outputs)
    loss = loss_fn(value, target)
    if not loss.isfinite():
        for stage in stages:
            stage.skips_update = True
        return loss.item()
    (loss * share).backward()
    gradients = [part.grad for part in parts(value)]
    for stage, (_, backward), done in zip(*map(reversed, (stages, rules, passes)), strict=True):
        stage.backward(done, backward, gradients)
        gradients = [part.grad for part in parts(done.inputs)]
    return loss.item()


def losses_of_calls(
    of_microbatches: Sequence[float],
    calls: Sequence[Call],
    num_microbatches: int,
    weigh: Weigh = len,
) -> list[float]:
    """Return the weighted mean loss of each step."""
    means = []
    for index, (_, target) in enumerate(calls):
        weights = [weigh(part) for part in target.tensor_split(num_microbatches)]
        own = of_microbatches[index * num_microbatches :][:num_microbatches]
        means.append(sum(n * loss for n, loss in zip(weights, own, strict=True)) / weigh(target))
    return means


@one_thread()
def train_plainly(
    build_layers: Callable[[], Sequence[nn.Module]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer_fn: OptimizerFactory,
    streams: Sequence[Sequence[Call]],
    num_microbatches: int,
    *,
    update_each: bool,
) -> nn.Sequential:
    """Train the unsplit model in a plain loop, with an update for each microbatch or each step."""
    model = nn.Sequential(*build_layers())
    made = optimizer_fn(list(model.parameters()))
    optimizers = made if isinstance(made, list) else [made]
    every = 1 if update_each else num_microbatches
    calls = [call for stream in streams for call in stream]
    for m, (inputs, target, share) in enumerate(microbatches(calls, num_microbatches, every)):
        (loss_fn(model(inputs), target) * share).backward()
        if (m + 1) % every == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return model
