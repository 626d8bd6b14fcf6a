"""Stages in bfloat16 with float32 masters, in the optimizer's pass and in the predictions of it."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from pyparallel.optim import SGD, AdamW
from pyparallel.pipeline import (
    OneForwardOneBackward,
    PipelineTrainer,
    PipeOptim,
    UpdateErrorFeedback,
)
from tests.cases import slow
from tests.pipeline import jobs, reference
from tests.pipeline.jobs import CORRECTED, DEEP, OF_EACH_KIND, Trained, train, train_on
from tests.pipeline.models import EPS, SPLITS, build_calls, build_layers

BFLOAT = torch.bfloat16
STREAMS = [build_calls(3, 12, BFLOAT), build_calls(1, 12, BFLOAT)]
SCHEDULES = [each for each in jobs.SCHEDULES if each != CORRECTED]
MOMENTUM, LR = 0.9, 0.05
OPTIMIZERS = {
    "SGD": partial(SGD, lr=LR, momentum=MOMENTUM, master_weights=True),
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.1, eps=EPS, master_weights=True),
}
TORCHS = {
    "SGD": partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, foreach=False),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=EPS, foreach=False),
}


class Masters(Optimizer):
    """Torch's optimizer on float32 copies of the parameters, which get the rounded copies."""

    def __init__(self, make, parameters):
        self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
        self.inner = make(self.masters)
        super().__init__(parameters, {"lr": self.inner.param_groups[0]["lr"]})

    def __getstate__(self):
        return self.__dict__

    @torch.no_grad()
    def step(self, closure=None):
        pairs = list(zip(self.param_groups[0]["params"], self.masters, strict=True))
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.inner.step()
        for parameter, master in pairs:
            parameter.copy_(master)


def predict(version, horizon):
    """Predict from the masters, and round what is predicted."""
    ahead = version.weights()
    names = {id(parameter): name for name, parameter in version.parameters.items()}
    for optimizer in version.optimizers:
        (group,) = optimizer.inner.param_groups
        parameters = optimizer.param_groups[0]["params"]
        for parameter, master in zip(parameters, optimizer.masters, strict=True):
            state = optimizer.inner.state.get(master)
            if state:
                step = reference.last_step(group, state, master.grad)
                moved = master.detach() - group["lr"] * horizon * step
                ahead[names[id(parameter)]] = moved.to(BFLOAT)
    return ahead


def train_with_masters(schedule, num_stages: int, name: str) -> Trained:
    return train(schedule, build_layers(BFLOAT), SPLITS[num_stages], OPTIMIZERS[name], STREAMS)


def expected(schedule, name: str) -> reference.Trained:
    return reference.train_in_one_process(
        partial(build_layers, BFLOAT),
        SPLITS[4], mse_loss, partial(Masters, TORCHS[name]), schedule, STREAMS, 4, predict,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "schedules", "num_ranks"),
    [
        ("AdamW", OF_EACH_KIND, 1),
        ("SGD", [PipeOptim()], 1),
        *(slow(name, SCHEDULES, 4) for name in OPTIMIZERS),
    ],
)
def test_stages_train_like_float32_copies_in_plain_torch(
    name, schedules, num_ranks, ranks, subtests
):
    if num_ranks == 1:
        trained = [train_with_masters(each, 4, name) for each in schedules]
    else:
        trained = train_on(ranks, DEEP, partial(train_with_masters, name=name), schedules)
    for schedule, found in zip(schedules, trained, strict=True):
        with subtests.test(schedule=schedule):
            wanted = expected(schedule, name)
            assert found.losses == wanted.losses
            torch.testing.assert_close(found.state, wanted.state, rtol=0, atol=0)


def build(schedule, **options) -> PipelineTrainer:
    return PipelineTrainer(
        build_layers(BFLOAT), mse_loss, OPTIMIZERS["AdamW"], schedule,
        num_microbatches=4, split=SPLITS[2], num_stages=2, **options,
    )  # fmt: skip


def states_of(trainer: PipelineTrainer) -> list[dict]:
    return [
        {
            **stage.module.state_dict(),
            **{f"{i}.{k}": v for i, each in saved for k, v in each.items()},
        }
        for stage in trainer.stages
        for saved in [stage.optimizer.state_dict()["state"].items()]
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("schedule", [OneForwardOneBackward(), PipeOptim()])
def test_a_run_resumes_bit_for_bit(schedule, tmp_path):
    trainer = build(schedule)
    for batch in STREAMS[0]:
        trainer.step(*batch)
    trainer.flush()
    torch.save(trainer.state_dict(), tmp_path / "state")
    dcp.save(trainer.sharded_state_dict(), checkpoint_id=tmp_path / "sharded")
    resumed, sharded = build(schedule), build(schedule)
    for each in (resumed, sharded):
        each.prepare(*STREAMS[0][0])
    resumed.load_state_dict(torch.load(tmp_path / "state"))
    sharded.load_checkpoint(tmp_path / "sharded")
    for each in (trainer, resumed, sharded):
        for batch in STREAMS[1]:
            each.step(*batch)
        each.flush()
    wanted = states_of(trainer)
    assert wanted[0]["0.master_param"].dtype == torch.float32
    for each in (resumed, sharded):
        torch.testing.assert_close(states_of(each), wanted, rtol=0, atol=0)


def test_error_feedback_of_updates_is_refused():
    with pytest.raises(ValueError, match="have master_weights=False, got True: it corrects the"):
        build(PipeOptim(), correction=UpdateErrorFeedback())
