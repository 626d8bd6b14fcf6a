"""Interlocking trainings in one process and on ranks, and the cases of them."""

import zlib
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from pyparallel.compression import TopK
from pyparallel.pipeline import Farthest, Head, Interlocking, Mean, PipelineTrainer, Sum, TiedHead
from pyparallel.pipeline.interlocking.window import Losses
from pyparallel.pipeline.messages import Value
from tests.cases import pairwise as pairwise_cases
from tests.pipeline.interlocking import reference
from tests.pipeline.jobs import Trained
from tests.pipeline.models import (
    OPTIMIZERS,
    SPLIT_WITH_BARE_STAGE,
    SPLITS,
    build_calls,
    smooth_muon,
)
from tests.pipeline.models import build_layers as build_plain_layers

State = dict[str, list[Tensor]]
RULES = {
    Farthest(): reference.farthest,
    Sum(): reference.sum_of_window,
    Mean(): reference.mean_of_window,
}


class AnyHead(nn.Module):
    """A head for any output of a stage, of which it reads three tensors at most."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, value):
        tensors = (value,) if isinstance(value, Tensor) else value[:3]
        return self.linear(sum(each for each in tensors if each.is_floating_point()))


@dataclass(frozen=True)
class AnyHeadBuilder(Head):
    def build(self, example: Value) -> nn.Module:
        return AnyHead().to(torch.float64)


@dataclass(frozen=True)
class Case:
    """One training, flushed after two steps and again after one, on uneven batches."""

    window: int
    losses: Losses = field(default_factory=Farthest)
    num_microbatches: int = 3
    optimizer: str = "momentum"
    dtype: torch.dtype = torch.float64
    bare_stage: bool = False
    dropout: bool = False
    compressed: bool = False  # losslessly

    def __str__(self):
        return "-".join(str(value) for value in vars(self).values())

    def split(self, num_stages: int) -> list[int]:
        return SPLIT_WITH_BARE_STAGE if self.bare_stage else SPLITS[num_stages]

    @property
    def calls(self) -> list[list[tuple[Tensor, Tensor]]]:
        calls = build_calls(3, 13, self.dtype)
        return [calls[:2], calls[2:]]

    def layers(self) -> list[nn.Module]:
        layers = build_plain_layers(self.dtype)
        if self.dropout:
            layers[3:5] = [nn.Dropout(0.3), layers[3]]
            layers[9] = nn.Dropout(0.3)
        return layers

    def heads(self, num_stages: int) -> list[nn.Module]:
        torch.manual_seed(21)
        return [AnyHead().to(self.dtype) for _ in range(num_stages - 1)]


@smooth_muon()
def train_case(case: Case, num_stages: int) -> Trained:
    """Train a case with the trainer."""
    layers, heads = case.layers(), case.heads(num_stages)
    torch.manual_seed(0)  # of the run
    trainer = PipelineTrainer(
        layers,
        mse_loss,
        OPTIMIZERS[case.optimizer],
        Interlocking(case.window, heads, case.losses),
        num_microbatches=case.num_microbatches,
        split=case.split(num_stages),
        compress_activations=TopK(1.0) if case.compressed else None,
        compress_gradients=TopK(1.0) if case.compressed else None,
    )
    done = Trained()
    for calls in case.calls:
        for call in calls:
            done.losses.append(trainer.step(*call))
        trainer.flush()
    done.state = state_of(trainer)
    return done


def seed_of(step: int, stage: int) -> int:
    """Return the seed of the only microbatch of a step, in a run with the seed 0."""
    return (zlib.crc32(f"0/None/{step}/0".encode()) + 0x9E3779B1 * (1 + 2 * stage)) % 2**32


@cache
@smooth_muon()
def expected(case: Case, num_stages: int) -> Trained:
    """Train a case with the reference, with dropout in batches of one microbatch."""
    layers, split = case.layers(), case.split(num_stages)
    bounds = pairwise([0, *split, len(layers)])
    model = reference.ReferenceTrainer(
        [nn.Sequential(*layers[begin:end]) for begin, end in bounds],
        case.heads(num_stages),
        mse_loss,
        OPTIMIZERS[case.optimizer],
        case.window,
        RULES[case.losses],
        num_microbatches=case.num_microbatches,
        seed_of=seed_of if case.dropout else None,
    )
    losses = []
    for call in (call for calls in case.calls for call in calls):
        losses.append(model.step(*call))
    return Trained(losses, model.state())


def state_of(trainer: PipelineTrainer) -> State:
    """Return the state of this rank's modules and heads."""
    state = {}
    for stage in trainer.stages:
        state[f"{stage.index}.module"] = values_of(stage.module)
        if stage.head is not None:
            state[f"{stage.index}.head"] = values_of(stage.head.module)
    return state


def values_of(module: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def language_layers(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Return four stages of two layers each, on tokens."""
    torch.manual_seed(31)
    layers: list[nn.Module] = [nn.Embedding(11, 6)]
    for _ in range(3):
        layers += [nn.Linear(6, 6), nn.Tanh()]
    return [each.to(dtype) for each in [*layers, nn.Linear(6, 11)]]


def language_calls(number: int = 5) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(32)
    tokens = [torch.randint(0, 11, (7, 5)) for _ in range(number)]
    return [(each, each.roll(-1, dims=1)) for each in tokens]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


LANGUAGE_SPLIT = [2, 4, 6]


def train_tied(window: int, num_stages: int) -> Trained:
    """Train with three heads that read the first stage's embedding, which each step updates."""
    layers = language_layers()
    if dist.is_initialized() and dist.get_rank() > 0:
        with torch.no_grad():
            layers[0].weight.fill_(float("nan"))  # must not be read on this rank
    trainer = PipelineTrainer(
        layers, token_loss, OPTIMIZERS["momentum"], Interlocking(window, TiedHead(layers[0])),
        num_microbatches=2, split=LANGUAGE_SPLIT,
    )  # fmt: skip
    losses = [trainer.step(*call) for call in language_calls()]
    trainer.flush()
    return Trained(losses, state_of(trainer))


def train_built(seed: int, num_stages: int) -> Trained:
    """Train with heads from a builder."""
    layers, calls = build_plain_layers(torch.float64), build_calls(3, 13)
    torch.manual_seed(seed)
    trainer = PipelineTrainer(
        layers, mse_loss, OPTIMIZERS["AdamW"], Interlocking(2, AnyHeadBuilder()),
        num_microbatches=3, split=SPLITS[num_stages],
    )  # fmt: skip
    losses = [trainer.step(*call) for call in calls]
    trainer.flush()
    return Trained(losses, state_of(trainer))


WINDOWS = [1, 2, 3, 4]
# Every window with every rule, and every optimizer, dtype and split with some window.
CASES = [
    *(Case(*each) for each in pairwise_cases(WINDOWS, list(RULES), (1, 3))),
    *(
        Case(window, optimizer=name)
        for window, name in [(4, "AdamW"), (2, "groups"), (2, "Muon, AdamW")]
    ),
    Case(3, bare_stage=True),
    Case(4, Sum(), bare_stage=True),
    Case(3, dtype=torch.float32),
]
OVER_RANKS = [
    Case(1, num_microbatches=1),
    Case(2),
    Case(3, Sum()),
    Case(4, Mean()),
    Case(4, Sum(), bare_stage=True),
    Case(3, dtype=torch.float32, compressed=True),
]
WITH_DROPOUT = [Case(window, num_microbatches=1, dropout=True) for window in (1, 3)]
OF_TWO = [Case(1), Case(2, Mean())]


def assert_same(found, wanted, tolerance=1e-12):
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    torch.testing.assert_close(found.state, wanted.state, rtol=tolerance, atol=tolerance)


def chain(seed=41, width=6):
    """Return four plain stages and three heads."""
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    heads = [nn.Linear(width, 2) for _ in range(3)]
    stages[3] = nn.Linear(width, 2)
    return [each.double() for each in stages], [each.double() for each in heads]


def interlock(stages, heads, window, losses=None, **options):
    """Return a trainer in one process, with each layer a stage."""
    settings = {"num_microbatches": 1, "loss_fn": mse_loss, "optimizer": "momentum", **options}
    return PipelineTrainer(
        stages, settings["loss_fn"], OPTIMIZERS[settings["optimizer"]],
        Interlocking(window, heads, losses or Farthest()),
        num_microbatches=settings["num_microbatches"], split=range(1, len(stages)),
    )  # fmt: skip


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
