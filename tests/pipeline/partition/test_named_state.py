"""States under the plain model's names: saved by DCP, loaded on another split, gathered whole."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR

from pyparallel import optim
from pyparallel.pipeline import (
    Interlocking,
    LinearHead,
    OneForwardOneBackward,
    PipeDream2BW,
    PipelineTrainer,
    PipeOptim,
    UpdateErrorFeedback,
)

adam = partial(optim.AdamW, lr=0.05)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


WORDS, WIDTH = 7, 6


class Tied(nn.Module):
    """A model with names of its own; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Layers(list):
    """The layers of a model, as ``split_model`` returns them."""

    def __init__(self, model):
        super().__init__([model.embed, *model.blocks, nn.Sequential(model.norm, model.head)])
        self.model = model


def alone(parameters):
    """A group for each parameter, so that stages have other numbers of groups, and an empty one."""
    groups = [{"params": [each], "lr": 0.01 * (1 + each.dim())} for each in parameters]
    return torch.optim.AdamW([{"params": []}, *groups])


def warmed_up(optimizer):
    parts = [LinearLR(optimizer, 0.1, total_iters=4), StepLR(optimizer, 1)]
    return SequentialLR(optimizer, parts, milestones=[4])  # after the checkpoint


def several(parameters, names):
    """Muon for the blocks' matrices, by their names in the whole model."""
    named = list(zip(names, parameters, strict=True))
    matrices = [p for name, p in named if name.startswith("blocks.") and p.dim() == 2]
    others = [p for name, p in named if not (name.startswith("blocks.") and p.dim() == 2)]
    made = [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
    return [*made, torch.optim.AdamW(others, lr=0.02)] if others else made


def build(schedule, split, optimizer_fn=adam, **options):
    torch.manual_seed(0)
    model = Tied()
    trainer = PipelineTrainer(
        Layers(model), nn.functional.cross_entropy, optimizer_fn, schedule,
        num_microbatches=4, split=split,
        **{"scheduler_fn": partial(StepLR, step_size=3, gamma=0.7), **options},
    )  # fmt: skip
    return model, trainer


def batches(number, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, WORDS, (16,), generator=generator)
    return [(draw(), draw()) for _ in range(number)]


def run(trainer, seed):
    losses = [trainer.step(*batch) for batch in batches(3, seed)]
    trainer.flush()
    return losses


def save_and_resume(rank, folder, schedule, optimizer_fn, options):
    """Return whether the resumed run equals the first one, to the bit."""
    _, trainer = build(schedule, [3], optimizer_fn, **options)
    run(trainer, 1)
    saving = dcp.async_save(trainer.sharded_state_dict(), checkpoint_id=folder)
    losses = run(trainer, 2)  # while it is written
    saving.result()
    _, other = build(schedule, [3], optimizer_fn, **options)
    other.load_checkpoint(folder)
    again = run(other, 2)
    state, same = trainer.full_state_dict(), other.full_state_dict()
    assert state.keys() == same.keys()
    assert bool(state) == (rank == 0)
    is_same = rank == 0 or losses == again  # rank 0 begins without the loss of the step before
    return is_same and all(torch.equal(state[name], same[name]) for name in state)


CASES = {
    "1f1b": (OneForwardOneBackward(), adam, {}),
    "2bw": (PipeDream2BW(), momentum, {"correction": UpdateErrorFeedback()}),
    "pipeoptim": (PipeOptim(), several, {"max_norm": 0.1}),
    "groups": (OneForwardOneBackward(), alone, {"scheduler_fn": warmed_up}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_bitwise_on_the_same_split(name, ranks, tmp_path):
    assert ranks.run(2, save_and_resume, str(tmp_path), *CASES[name]) == [True, True]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_norms_for_clipping_go_to_any_split(tmp_path):
    _, trainer = build(PipeOptim(), [3], max_norm=0.1)
    run(trainer, 1)
    dcp.save(trainer.sharded_state_dict(), checkpoint_id=tmp_path / "clipped")
    norms = torch.cat([stage.clipper.last for stage in trainer.stages])
    for split in ([1, 2, 4], []):
        _, other = build(PipeOptim(), split, max_norm=0.1)
        other.load_checkpoint(tmp_path / "clipped")
        loaded = torch.cat([stage.clipper.last for stage in other.stages])
        assert torch.equal(loaded, norms)
        run(other, 2)
    _, free = build(PipeOptim(), [3])
    free.load_checkpoint(tmp_path / "clipped")
    run(free, 2)
    dcp.save(free.sharded_state_dict(), checkpoint_id=tmp_path / "free")
    trainer.load_checkpoint(tmp_path / "free")  # norms count 0, as before the first update
    assert not any(stage.clipper.last.any() for stage in trainer.stages)


def save(rank, folder):
    model, trainer = build(PipeOptim(), [2, 4] if rank is None else [3])
    run(trainer, 1)
    dcp.save(trainer.sharded_state_dict(), checkpoint_id=folder)
    state = trainer.full_state_dict()
    if rank in (0, None):
        model.load_state_dict(state)
        model.eval()
    return state, trainer.evaluate(*batches(1, 5)[0])


def load(rank, folder, split, schedule):
    _, trainer = build(schedule, split)
    before = copy.deepcopy(trainer.full_state_dict())
    trainer.load_checkpoint(folder)
    loss = trainer.evaluate(*batches(1, 5)[0])
    state = trainer.full_state_dict()
    return before, state, loss, run(trainer, 2), trainer.full_state_dict()


def value(outcomes):
    return next(each for each in outcomes if each is not None)


@pytest.mark.slow
def test_another_split_schedule_and_number_of_ranks_go_on_from_it(ranks, tmp_path, subtests):
    folder = str(tmp_path)
    (state, _), (_, loss) = ranks.run(2, save, folder)
    plain = Tied()
    assert state.keys() == plain.state_dict().keys()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load({"model": plain.state_dict()}, checkpoint_id=folder)
    for name, expected in state.items():
        assert torch.equal(plain.state_dict()[name], expected), name
    whole = load(0, folder, [], OneForwardOneBackward())  # the unsplit model goes on
    for num_ranks, split in [(1, [1, 2, 3, 4]), (2, [1]), (2, [5]), (3, [2, 4])]:
        with subtests.test(f"{num_ranks} {split}"):
            args = folder, split, OneForwardOneBackward()
            outcomes = [load(0, *args)] if num_ranks == 1 else ranks.run(num_ranks, load, *args)
            before, loaded, _, _, trained = outcomes[0]
            assert not torch.equal(before["embed.weight"], state["embed.weight"])
            assert loaded.keys() == state.keys() == trained.keys()
            assert all(torch.equal(loaded[name], state[name]) for name in state)
            torch.testing.assert_close(value(each[2] for each in outcomes), loss)
            losses = [value(each) for each in zip(*(o[3] for o in outcomes), strict=True)]
            torch.testing.assert_close(losses, whole[3], rtol=1e-5, atol=1e-6)
            for name in state:
                torch.testing.assert_close(trained[name], whole[4][name], rtol=1e-5, atol=1e-6)


def make_mistakes(rank, folder):
    _, trainer = build(OneForwardOneBackward(), [3])
    run(trainer, 1)
    before = copy.deepcopy(trainer.full_state_dict())
    errors = []

    def attempt(function, *args):
        try:
            function(*args)
        except (ValueError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    dcp.save(trainer.sharded_state_dict(), checkpoint_id=f"{folder}/good")
    part = {
        key: each for key, each in trainer.sharded_state_dict().items() if "blocks.3" not in key
    }
    dcp.save(part, checkpoint_id=f"{folder}/part")
    attempt(trainer.load_checkpoint, f"{folder}/part")
    attempt(trainer.load_checkpoint, f"{folder}/none")
    _, other = build(OneForwardOneBackward(), [3], momentum)
    attempt(other.load_checkpoint, f"{folder}/good")
    _, other = build(OneForwardOneBackward(), [3], momentum, scheduler_fn=None)
    attempt(other.load_checkpoint, f"{folder}/good")
    _, wide = build(PipeOptim(), [3])
    wide.step(*batches(1, 1)[0])
    attempt(wide.sharded_state_dict)
    attempt(wide.load_checkpoint, f"{folder}/good")
    _, interlocking = build(Interlocking(1, LinearHead(WORDS)), [3])
    attempt(interlocking.full_state_dict)
    _, several = build(OneForwardOneBackward(), None, num_stages=4)
    attempt(several.load_checkpoint, f"{folder}/good")
    attempt(trainer.load_into, Tied().blocks if rank == 1 else None)
    narrow = Tied()
    narrow.blocks[0].bias = nn.Parameter(torch.zeros(1))
    attempt(trainer.load_into, narrow if rank == 0 else None)
    attempt(trainer.load_into, "model" if rank == 0 else None)
    state = trainer.full_state_dict()
    unchanged = all(torch.equal(state[name], before[name]) for name in before)
    return errors, unchanged, take_the_saved_split(trainer, f"{folder}/good")


def take_the_saved_split(trainer, folder):
    """Return whether a trainer without a split takes that of a state and goes on from it."""
    _, by_name = build(OneForwardOneBackward(), None)
    by_name.load_checkpoint(folder)
    _, by_stage = build(OneForwardOneBackward(), None)
    by_stage.load_state_dict(trainer.state_dict())
    whole, losses = Tied(), [run(each, 2) for each in (trainer, by_name, by_stage)]
    trainer.load_into(whole)  # on every rank
    assert torch.equal(whole.head.weight, whole.embed.weight)
    whole.eval()
    inputs, targets = batches(1, 5)[0]
    evaluated = trainer.evaluate(inputs, targets)
    if evaluated is not None:
        own = nn.functional.cross_entropy(whole(inputs), targets).item()
        assert own == pytest.approx(evaluated, rel=1e-6)
    state = trainer.full_state_dict()
    assert all(torch.equal(whole.state_dict()[name], state[name]) for name in state)
    return by_name.split == by_stage.split == (3,) and losses[0] == losses[1] == losses[2]


def test_a_checkpoint_of_something_else_is_one_error_on_every_rank(ranks, tmp_path):
    (first, *held), (second, *_) = ranks.run(2, make_mistakes, str(tmp_path))
    assert held == [True, True]
    assert first == second
    for error, words in zip(
        first,
        [
            "rank 1: checkpoint_id must hold the sharded_state_dict() of a trainer of the same",
            "checkpoint_id must be a folder that torch.distributed.checkpoint has saved, got",
            "good without scheduler.SGD.0",
            "checkpoint_id must be of the same optimizer, SGD for ",
            "sharded_state_dict() must be called after flush()",
            "load_checkpoint() must be called after flush()",
            "full_state_dict() must come after the first step or prepare(...)",
            "the state's split must be of 4 stages, as many as the trainer has, got (3,); give th",
            "rank 1: model must have the names of what was trained, got one with 0.bias, which was",
            "rank 0: blocks.0.bias of model must be of shape [6], as it was trained, got [1]",
            "rank 0: model must be a module, or None on a rank that needs none, got 'model'",
        ],
        strict=True,
    ):
        assert words in error


class WithExtraState(nn.Linear):
    extra: object = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def full_states_with(rank, extras):
    return [full_state_with(extra) for extra in extras]


def full_state_with(extra):
    layers = [WithExtraState(4, 4), WithExtraState(4, 4)]
    layers[1].extra = extra
    trainer = PipelineTrainer(
        layers, nn.functional.mse_loss, adam, OneForwardOneBackward(), num_microbatches=2, split=[1]
    )
    trainer.step(torch.ones(4, 4), torch.ones(4, 4))
    try:
        return trainer.full_state_dict()
    except ValueError as error:
        return str(error)


SENT = [torch.tensor([1.0, 2.0]).half(), {"amax": [0.1, float("inf")], "on": True}, None]
REFUSED = [(1, 2), b"bytes", {1: 2}, {"scale": torch.ones(2)}]


def test_a_modules_extra_state_is_sent(ranks):
    names = [f"{i}.{name}" for i in (0, 1) for name in ("weight", "bias", "_extra_state")]
    for extra, first, second in zip(SENT, *ranks.run(2, full_states_with, SENT), strict=True):
        assert second == {}
        assert list(first) == names
        assert first["0._extra_state"] is None
        got = first["1._extra_state"]
        assert torch.equal(got, extra) if isinstance(extra, torch.Tensor) else got == extra


def test_an_extra_state_that_would_need_a_pickle_is_refused(ranks):
    words = "rank 1: 1._extra_state must be a tensor or of JSON's types for full_state_dict(), got"
    for first, second in zip(*ranks.run(2, full_states_with, REFUSED), strict=True):
        assert first == second
        assert first.startswith(words)
        assert first.endswith("; save sharded_state_dict()")
