"""Interlocking backpropagation is what its paper says (arXiv 2010.04116)."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import StepLR

from pyparallel import pipeline
from pyparallel.pipeline import (
    Farthest,
    Interlocking,
    Kind,
    LinearHead,
    Mean,
    OneForwardOneBackward,
    PipelineTrainer,
    Sum,
    simulate,
)
from pyparallel.pipeline.interlocked import Interlocked as Streaming
from pyparallel.pipeline.interlocked_stage import InterlockedStage
from pyparallel.pipeline.mail import Lane, Mail
from tests.pipeline.interlocked_jobs import (
    DROPPING,
    EVERY_CASE,
    OF_TWO,
    OVER_RANKS,
    RULES,
    WINDOWS,
    Case,
    Judge,
    Trained,
    expected,
    language_calls,
    language_layers,
    of_pipe,
    state_of,
    token_loss,
    train_built,
    train_case,
    train_tied,
    values_of,
)
from tests.pipeline.interlocked_reference import Interlocked
from tests.pipeline.models import OPTIMIZERS, build_calls, build_layers
from tests.workers import run_ranks

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def assert_same(found, wanted, tolerance=1e-12):
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    torch.testing.assert_close(found.state, wanted.state, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_one_process_trains_as_the_reference_does(case):
    assert_same(train_case(case, 4), expected(case, 4), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", OVER_RANKS, ids=str)
def test_so_does_a_rank_for_each_stage(case):
    assert_same(of_pipe(4, train_case, case), expected(case, 4), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", OF_TWO, ids=str)
def test_so_do_two_stages(case):
    assert_same(of_pipe(2, train_case, case), expected(case, 2))
    assert_same(train_case(case, 2), expected(case, 2))


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_single_stage_has_no_heads_and_learns_as_ever(num_microbatches):
    case = Case(1, num_microbatches=num_microbatches)
    assert_same(train_case(case, 1), expected(case, 1))


@pytest.mark.parametrize("case", DROPPING, ids=str)
def test_dropout_draws_what_it_draws_without_a_pipe(case):
    assert_same(train_case(case, 4), expected(case, 4))
    assert_same(of_pipe(4, train_case, case), expected(case, 4, seeded=True))


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_the_whole_window_is_plain_training(optimizer, num_microbatches):
    case = Case(4, num_microbatches=num_microbatches, optimizer=optimizer)
    model = nn.Sequential(*case.layers())
    plain = OPTIMIZERS[optimizer](list(model.parameters()))
    for inputs, target in itertools.chain(*case.calls):
        parts = (each.tensor_split(num_microbatches) for each in (inputs, target))
        for x, y in zip(*parts, strict=True):
            (mse_loss(model(x), y) * (len(x) / len(inputs))).backward()
        plain.step()
        plain.zero_grad()
    found = train_case(case, 4).state
    modules = [value for stage in range(4) for value in found[f"{stage}.module"]]
    wanted = list(model.state_dict().values())
    torch.testing.assert_close(modules, wanted, rtol=1e-12, atol=1e-12)


def test_a_window_of_one_is_a_problem_for_each_stage_by_itself():
    """Whatever the stages behind it do, a stage learns from its own loss on what it is given."""
    case = Case(1, num_microbatches=1)
    layers, heads = case.layers(), [*case.heads(4), nn.Identity()]
    stages = [nn.Sequential(*layers[3 * s : 3 * s + 3]) for s in range(4)]
    calls = list(itertools.chain(*case.calls))
    given = [inputs for inputs, _ in calls]
    for stage, head in zip(stages, heads, strict=True):
        optimizer = OPTIMIZERS["momentum"]([*stage.parameters(), *head.parameters()])
        made = []
        for value, (_, target) in zip(given, calls, strict=True):
            output = stage(value)
            mse_loss(head(output), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            single = isinstance(output, torch.Tensor)
            made.append(output.detach() if single else tuple(each.detach() for each in output))
        given = made
    wanted = {f"{s}.module": values_of(stage) for s, stage in enumerate(stages)}
    wanted |= {f"{s}.head": values_of(head) for s, head in enumerate(heads[:3])}
    torch.testing.assert_close(train_case(case, 4).state, wanted, rtol=1e-12, atol=1e-12)


def chain(seed=41, width=6):
    """Four stages without frills, and three heads."""
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    heads = [nn.Linear(width, 2) for _ in range(3)]
    stages[3] = nn.Linear(width, 2)
    return [each.double() for each in stages], [each.double() for each in heads]


def interlock(stages, heads, window, losses=None, **options):
    """In one process, each layer a stage."""
    settings = {"num_microbatches": 1, "loss_fn": mse_loss, "optimizer": "momentum", **options}
    return PipelineTrainer(
        stages, settings["loss_fn"], OPTIMIZERS[settings["optimizer"]],
        Interlocking(window, heads, losses or Farthest()),
        num_microbatches=settings["num_microbatches"], split=range(1, len(stages)),
    )  # fmt: skip


def test_a_window_of_two_is_the_pairwise_rule():
    """Each module learns by the loss of the next one, which sends it its gradient at once."""
    stages, heads = chain()
    judges = [*heads, nn.Identity()]
    optimizers = [
        OPTIMIZERS["momentum"]([*stage.parameters(), *judge.parameters()])
        for stage, judge in zip(stages, judges, strict=True)
    ]
    calls = build_calls(6, 12)
    for inputs, target in calls:
        value, last = inputs, None
        for stage, judge in zip(stages, judges, strict=True):
            value = value.detach().requires_grad_()
            output = stage(value)
            entered = output.detach().requires_grad_()
            loss = mse_loss(judge(entered), target)
            loss.backward()  # the head, and the gradient of what it judges
            (gradient,) = torch.autograd.grad(output, value, entered.grad, retain_graph=True)
            if last is not None:
                last.backward(gradient)
            value, last = output, output
        last.backward(entered.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mine, my_heads = chain()
    trainer = interlock(mine, my_heads, 2)
    for call in calls:
        trainer.step(*call)
    for found, wanted in zip([*mine, *my_heads], [*stages, *heads], strict=True):
        torch.testing.assert_close(values_of(found), values_of(wanted), rtol=1e-12, atol=1e-12)


def gold(window, losses, num_stages):
    """Multipliers 2, 3, 4, 5 of ones, judged by a cross entropy, the last by a tenth of the sum."""

    class Multiplier(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), float(factor)))

        def forward(self, value):
            return value * self.weight

    layers = [Multiplier(2 + stage) for stage in range(num_stages)]
    trainer = PipelineTrainer(
        layers,
        lambda output, target: 0.1 * output.sum(),
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        Interlocking(
            window,
            [nn.Identity() for _ in layers[1:]],
            losses,
            head_loss_fn=cross_entropy,
        ),
        num_microbatches=1,
        split=range(1, num_stages),
    )
    trainer.step(torch.ones(1, 2), torch.tensor([1]))
    return [layer.weight.tolist() for layer in layers]


@pytest.mark.parametrize(
    ("window", "losses", "weights"),
    [
        (3, Farthest(), [[0.8, 0.8], [2.2, 2.2], [3.4, 3.4]]),
        (1, Farthest(), [[1.5, 2.5], [2.0, 4.0], [3.4, 3.4]]),
        (2, Farthest(), [[0.5, 3.5], [2.2, 2.2], [3.4, 3.4]]),
        (2, Sum(), [[0.0, 4.0], [1.2, 3.2], [3.4, 3.4]]),
        (2, Mean(), [[1.0, 3.0], [2.1, 3.1], [3.4, 3.4]]),
        (3, Farthest(), [[-4.0, 8.0], [-1.0, -1.0], [1.0, 1.0], [2.6, 2.6]]),
    ],
    ids=["end-to-end", "local", "pairwise", "sum", "mean", "3-wise"],
)
def test_the_authors_examples(window, losses, weights):
    found = gold(window, losses, len(weights))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(weights))


def changes_of(window, perturbed=None, losses=None):
    """What one step does to all modules and heads; a module or head is another before it."""
    stages, heads = chain()
    others, other_heads = chain(seed=42)
    if perturbed is not None:
        kind, stage = perturbed
        (stages if kind == "module" else heads)[stage] = (
            others if kind == "module" else other_heads
        )[stage]
    parts = [*(("module", each) for each in stages), *(("head", each) for each in heads)]
    before = [values_of(module) for _, module in parts]
    trainer = interlock(stages, heads, window, losses, num_microbatches=2)
    trainer.step(*build_calls(1, 6)[0])
    moved = [
        [after - was for after, was in zip(values_of(module), old, strict=True)]
        for (_, module), old in zip(parts, before, strict=True)
    ]
    return moved[:4], moved[4:]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


REACH = {  # which losses behind its own reach a stage of four
    Farthest(): lambda stage, window: {min(stage + window - 1, 3)},
    Sum(): lambda stage, window: set(range(stage, min(stage + window, 4))),
}


@pytest.mark.parametrize("losses", REACH)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_stage_depends_on_what_is_in_its_window_and_on_nothing_else(window, losses):
    modules, heads = changes_of(window, losses=losses)
    for later in range(1, 4):
        moved, moved_heads = changes_of(window, ("module", later), losses)
        for stage in range(later):
            within = later <= min(stage + window - 1, 3)
            assert same(moved[stage], modules[stage]) is not within, (stage, later)
            assert same(moved_heads[stage], heads[stage]), (stage, later)
    for owner in range(3):
        moved, moved_heads = changes_of(window, ("head", owner), losses)
        for stage in range(4):
            within = owner in REACH[losses](stage, window)
            assert same(moved[stage], modules[stage]) is not within, (stage, owner)
        for stage in set(range(3)) - {owner}:
            assert same(moved_heads[stage], heads[stage]), (stage, owner)
        assert not same(moved_heads[owner], heads[owner])


def gradients_posted(window, losses, monkeypatch):
    """How many arrive at each stage from the next, in a call of two microbatches."""
    counts = [0, 0, 0]
    post = Mail.post

    def counting(mail, to, number, value):
        if to.lane is Lane.GRADIENTS and to.stage >= 0 and value != ():
            counts[to.stage] += 1
        post(mail, to, number, value)

    monkeypatch.setattr(Mail, "post", counting)
    interlock(*chain(), window, losses, num_microbatches=2).step(*build_calls(1, 6)[0])
    return counts


@pytest.mark.parametrize("window", WINDOWS)
def test_so_many_gradients_leave(window, monkeypatch):
    of_paper = [min(window - 1, 4 - (stage + 2) + 1) for stage in range(3)]
    found = gradients_posted(window, Mean(), monkeypatch)
    assert found == [2 * each for each in of_paper]
    unread = [len([o for o in range(stage + 1, stage + window) if o < window - 1])
              for stage in range(3)]  # fmt: skip
    of_ours = [2 * (all_ - less) for all_, less in zip(of_paper, unread, strict=True)]
    assert gradients_posted(window, Farthest(), monkeypatch) == of_ours


def test_losses_in_evaluation_are_those_of_the_model_whatever_the_window():
    batch = build_calls(2, 7)[1]
    with torch.no_grad():
        model = nn.Sequential(*chain()[0])
        expected_loss = mse_loss(model(batch[0]), batch[1]).item()
    for window in WINDOWS:
        stages, heads = chain()
        before = [values_of(each) for each in (*stages, *heads)]
        trainer = interlock(stages, heads, window, num_microbatches=3)
        assert trainer.evaluate(*batch) == pytest.approx(expected_loss, rel=1e-12)
        assert all(map(same, before, map(values_of, (*stages, *heads))))


class Together:
    """Stages look for gradients only where they must wait for some, so that several are there."""

    def __init__(self, monkeypatch):
        self.sizes = []
        monkeypatch.setattr(Streaming, "_look_for_gradients", lambda *_: None)
        pull_back = InterlockedStage.pull_back

        def counting(stage, microbatch, gradients):
            self.sizes.append(len(gradients))
            return pull_back(stage, microbatch, gradients)

        monkeypatch.setattr(InterlockedStage, "pull_back", counting)


@pytest.mark.parametrize("case", [Case(4, Sum()), Case(4, Mean(), bare_stage=True)], ids=str)
def test_gradients_that_wait_together_go_through_a_stage_together(case, monkeypatch):
    alone = train_case(case, 4)
    together = Together(monkeypatch)
    assert_same(train_case(case, 4), alone)
    assert max(together.sizes) == 2


class Halved(torch.autograd.Function):
    """Reads the gradient as a number, which ``vmap`` has no rule for."""

    @staticmethod
    def forward(ctx, value):
        return value / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2 if gradient.abs().sum().item() else gradient


class Halve(nn.Module):
    def forward(self, value):
        return Halved.apply(value)


class Recomputed(nn.Sequential):
    def forward(self, value):
        return torch.utils.checkpoint.checkpoint(super().forward, value, use_reentrant=False)


@pytest.mark.parametrize("odd", [Halve, lambda: Recomputed(nn.Tanh(), nn.Dropout(0.2))])
def test_those_that_cannot_go_together_go_one_by_one(odd, monkeypatch):
    def train():
        stages, heads = chain()
        stages[1].append(odd())
        trainer = interlock(stages, heads, 4, Sum())
        torch.manual_seed(0)
        for call in build_calls(3, 6):
            trainer.step(*call)
        return state_of(trainer)

    alone = train()
    together = Together(monkeypatch)
    with pytest.warns(RuntimeWarning, match="stage 1 pulls gradients back one by one") as said:
        found = train()
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-12)
    assert max(together.sizes) == 2
    assert len(said) == 1


def test_batch_norm_sees_each_microbatch_once():
    for window in WINDOWS:
        case = Case(window, num_microbatches=3)
        *_, count = train_case(case, 4).state["1.module"]
        assert count == 10 * 3


@pytest.mark.parametrize("window", [1, 3])
def test_heads_may_share_the_embedding(window):
    found, alone = of_pipe(4, train_tied, window), train_tied(window, 4)
    wanted = tied_by_reference(window)
    assert_same(found, wanted)
    assert_same(alone, wanted)


class Tied(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.norm = nn.LayerNorm(6).double()
        self.embedding = (embedding,)  # in a tuple: not this module's

    def forward(self, value):
        return self.norm(value) @ self.embedding[0].weight.detach().T


def tied_by_reference(window):
    layers = language_layers()
    stages = [nn.Sequential(*layers[2 * s : 2 * s + 2]) for s in range(4)]
    heads = [Tied(layers[0]) for _ in range(3)]
    model = Interlocked(
        stages, heads, token_loss, OPTIMIZERS["momentum"], window, num_microbatches=2
    )
    return Trained([model.step(*call) for call in language_calls()], model.state())


def test_heads_are_built_alike_on_ranks_and_in_one_process():
    torch.manual_seed(0)
    wanted = train_built(5, 4)
    assert_same(of_pipe(4, train_built, 5), wanted)
    assert train_built(6, 4).losses != wanted.losses


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, value):
        return value.to(self.dtype)


def test_stages_may_be_of_several_dtypes():
    def build():
        stages, heads = chain()
        stages[0] = nn.Sequential(stages[0], Cast(torch.float32))
        stages[1] = nn.Sequential(stages[1].float(), Cast(torch.bfloat16))
        stages[2] = stages[2].bfloat16()
        stages[3] = nn.Sequential(Cast(torch.float64), stages[3])
        heads[1:] = [nn.Sequential(Cast(torch.float64), head) for head in heads[1:]]
        heads[0] = nn.Sequential(Cast(torch.float64), heads[0])
        return stages, heads

    for window in WINDOWS:
        stages, heads = build()
        model = Interlocked(stages, heads, mse_loss, OPTIMIZERS["momentum"], window)
        mine, my_heads = build()
        trainer = interlock(mine, my_heads, window)
        for call in build_calls(3, 8):
            trainer.step(*call)
            model.step(*call)
        assert state_of(trainer).keys() == model.state().keys()
        torch.testing.assert_close(state_of(trainer), model.state(), rtol=1e-2, atol=1e-3)


def test_each_stage_has_an_optimizer_for_its_head_too_and_a_scheduler_of_its_own():
    stages, heads = chain()
    trainer = PipelineTrainer(
        stages, mse_loss, OPTIMIZERS["momentum"], Interlocking(2, heads), num_microbatches=3,
        split=[1, 2, 3], scheduler_fn=lambda optimizer: StepLR(optimizer, 2),
    )  # fmt: skip
    for call in build_calls(3, 6):
        trainer.step(*call)
    for stage, module, head in zip(trainer.stages, stages, [*heads, nn.Identity()], strict=True):
        (group,) = stage.optimizer.param_groups
        assert group["lr"] == pytest.approx(0.005)
        assert list(map(id, group["params"])) == [
            id(p) for p in (*module.parameters(), *head.parameters())
        ]


def test_the_loss_of_a_head_is_told():
    stages, heads = chain()
    inputs, target = build_calls(1, 7)[0]
    with torch.no_grad():
        value, wanted = inputs, []
        for stage, head in zip(stages[:3], heads, strict=True):
            value = stage(value)
            wanted.append(mse_loss(head(value), target).item())
    trainer = interlock(stages, heads, 2, num_microbatches=3)
    trainer.step(inputs, target)
    assert [each.head_loss for each in trainer.stages[:3]] == pytest.approx(wanted)
    assert trainer.stages[3].head_loss is None


def test_what_has_no_parameters_or_learns_nothing_lets_gradients_through():
    """A frozen stage, one without parameters, and a head without any."""
    for window, losses in itertools.product(WINDOWS, (Farthest(), Sum())):
        results = []
        for build in (interlocked_by_reference, interlock):
            stages, heads = chain()
            stages[1].requires_grad_(False)
            stages[2] = nn.Tanh()
            heads[0] = nn.Sequential(nn.Flatten(), nn.AvgPool1d(3))
            trainer = build(stages, heads, window, losses)
            for call in build_calls(3, 6):
                trainer.step(*call)
            results.append([values_of(module) for module in (*stages, *heads)])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def interlocked_by_reference(stages, heads, window, losses):
    return Interlocked(
        stages, heads, mse_loss, OPTIMIZERS["momentum"], window, RULES[losses], num_microbatches=1
    )


def test_ranks_go_on_from_a_state_bit_for_bit():
    assert run_ranks(2, resume) == [{1: True, 2: True}] * 2


def resume(rank):
    return {window: goes_on(window) for window in (1, 2)}


def goes_on(window):
    def build(seed):
        layers = [*build_layers()[:5], nn.Dropout(0.2), *build_layers()[5:]]
        torch.manual_seed(seed)
        heads = [nn.Sequential(Judge(), nn.Dropout(0.2)).double()]
        return PipelineTrainer(
            layers, mse_loss, OPTIMIZERS["AdamW"], Interlocking(window, heads), num_microbatches=3,
            split=[7], scheduler_fn=lambda optimizer: StepLR(optimizer, 2, 0.5),
        )  # fmt: skip

    trainer, calls = build(1), build_calls(8, 13)
    for call in calls[:3]:
        trainer.step(*call)
    trainer.flush()
    state = copy.deepcopy(trainer.state_dict())
    generator = torch.get_rng_state()
    losses = [trainer.step(*call) for call in calls[3:]]
    trainer.flush()
    other = build(2)
    other.prepare(*calls[0])
    other.load_state_dict(state)
    torch.set_rng_state(generator)
    again = [other.step(*call) for call in calls[3:]]
    other.flush()
    rates = [each.stages[0].optimizer.param_groups[0]["lr"] for each in (trainer, other)]
    assert rates == [0.01 / 16] * 2
    here, there = state_of(trainer), state_of(other)
    return losses == again and all(same(here[name], there[name]) for name in here)


def test_a_state_is_loaded_into_stages_that_have_been_built():
    stages, heads = chain()
    trainer = interlock(stages, heads, 2)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) must come after prepare\("):
        trainer.load_state_dict({"0": {}, "1": {}})


def test_the_simulator_refuses_what_it_has_no_rule_for():
    with pytest.raises(ValueError, match=r"actions must be of the kinds F, B, I, W and U, got 0H0"):
        simulate(Interlocking(2, LinearHead(2)).actions(3, 2))


def test_actions_in_order():
    actions = Interlocking(2, LinearHead(2)).actions(3, 2)
    assert [" ".join(map(str, rank)) for rank in actions] == [
        "0F0 0H0 0F1 0H1 0L0 0L1 0U1",
        "1F0 1H0 1F1 1H1 1L0 1L1 1U1",
        "2F0 2L0 2F1 2L1 2U1",
    ]


def test_the_whole_window_is_one_forward_one_backward():
    ours = Interlocking(4, LinearHead(2)).actions(4, 6)
    theirs = OneForwardOneBackward().actions(4, 6)
    for mine, plain in zip(ours, theirs, strict=True):
        relevant = [a for a in mine if a.kind is not Kind.HEAD]
        assert [(a.stage, a.kind is Kind.LEARN, a.microbatch) for a in relevant] == [
            (a.stage, a.kind is Kind.BACKWARD, a.microbatch) for a in plain
        ]


@pytest.mark.parametrize("losses", [Farthest(), Sum(), Mean()])
def test_it_is_a_value(losses):
    schedule = Interlocking(2, (LinearHead(3), LinearHead(4)), losses, max_ahead=2)
    again = eval(repr(schedule), vars(pipeline).copy())
    assert again == schedule
    assert hash(again) == hash(schedule)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
@pytest.mark.parametrize("name", ["window", "max_ahead"])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a positive integer, got {value}$"):
        Interlocking(**{"window": 2, name: value})


@pytest.mark.parametrize("losses", ["sum", Sum, None])
def test_losses_are_a_rule(losses):
    with pytest.raises(
        ValueError, match=r"^losses must have a method weight\(origin, stage, farth"
    ):
        Interlocking(2, LinearHead(2), losses)
