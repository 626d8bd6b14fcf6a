"""What Lightning's ``Trainer`` does around training: evaluation, exceptions, names, precision."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyparallel import SGP, GossipDataParallel, topology
from tests.integrations.test_lightning import (
    AutoEncoder,
    GossipStrategy,
    L,
    assert_equal,
    batches_of,
    fit,
    launched,
    samples,
)

pytestmark = pytest.mark.slow  # test_lightning.py has a fast check of this host


class Evaluated(AutoEncoder):
    """One that also tests and predicts, and fails in the second validation if it is told to."""

    def __init__(self, fails=False):
        super().__init__()
        self.fails, self.before = fails, {}

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.fails and self.trainer.current_epoch == 1:
            raise ArithmeticError("of the module")

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_train_epoch_start(self):
        self.before = {}

    def on_validation_model_eval(self):  # before the consensus
        super().on_validation_model_eval()
        self.before = copy.deepcopy(self.state_dict())


def loaders():
    return DataLoader(TensorDataset(samples()), 4)


def trainer_of(strategy, **options):
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 2}
    return L.Trainer(strategy=strategy, **options)


def check_evaluation(rank, folder):
    """Validate, test and predict without ``fit``, and after it; both have names."""
    for name in ("gossip", "compressed_ddp"):
        module, trainer = Evaluated(), trainer_of(name, max_epochs=1)
        for after_fit in (False, True):
            if after_fit:
                trainer.fit(module, loaders())
                del module.validation[:]
            with torch.no_grad():
                expected = [module.loss([batch]).item() for batch in batches_of(rank)]
            trainer.validate(module, loaders(), verbose=False)
            trainer.test(module, loaders(), verbose=False)
            assert module.validation == expected * 2
            predicted = trainer.predict(module, loaders())
            assert [each.item() for each in predicted] == expected
            trainer.save_checkpoint(f"{folder}/{name}-{after_fit}.ckpt")
        weights = [None] * 2
        dist.all_gather_object(weights, [p.tolist() for p in module.parameters()])
        assert weights[0] == weights[1]
        assert trainer.strategy.metrics() == {} or name == "compressed_ddp"


def check_sanity_and_exceptions(rank, folder):
    def strategy():
        return GossipStrategy(SGP(topology.Ring, overlap=1))

    plain = fit(folder, strategy(), 2)[1]
    module = Evaluated(fails=True)
    with pytest.raises(ArithmeticError, match="of the module"):
        fit(folder, strategy(), 2, module, num_sanity_val_steps=2)
    assert module.losses == plain.losses  # the sanity check has changed nothing
    assert module.validation[2:-1] == plain.validation[: len(module.validation) - 3]
    assert_equal(module.state_dict(), module.before)  # this rank's own weights again
    different = [None] * 2
    dist.all_gather_object(different, [p.tolist() for p in module.parameters()])
    assert different[0] != different[1]


def check_precision(rank, folder):
    """Train in bfloat16, and resume bit for bit."""
    seen = []

    class InBFloat16(AutoEncoder):
        def training_step(self, batch, batch_idx):
            seen.append(self.encoder[0].weight.dtype)
            return super().training_step(batch, batch_idx)

    def run(epochs, **options):
        strategy = GossipStrategy(SGP(topology.Ring))
        module = InBFloat16()
        return fit(folder, strategy, epochs, module, precision="bf16-true", **options)

    whole = run(2)[1]
    path = run(1)[0].checkpoint_callback.best_model_path
    resumed = run(2, resume=path)[1]
    assert set(seen) == {torch.bfloat16}
    assert whole.losses[len(resumed.losses) :] == resumed.losses
    assert_equal(resumed.state_dict(), whole.state_dict())


def check_two_fits(rank, folder):
    """A second ``fit`` of a trainer goes on, with a new optimizer, from the consensus."""
    trainer, module = fit(folder, GossipStrategy(), 1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loaders())
    assert len(module.losses) == 2 * len(batches_of(rank))
    assert module.losses[-1] < module.losses[0]


def run(rank, check, folder):
    return launched(globals()[check])(rank, folder)


@pytest.mark.parametrize("check", ["evaluation", "sanity_and_exceptions", "precision", "two_fits"])
def test_lightning_around_training(ranks, tmp_path, check):
    ranks.run(2, run, f"check_{check}", str(tmp_path))


class WithBatchNorm(AutoEncoder):
    """A module with statistics of batches."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))


def fail(rank, folder):
    """Return the errors of modules that communicate by themselves, or are wrapped already."""
    module = AutoEncoder()
    wrapped = GossipDataParallel(module, module.configure_optimizers(), SGP(topology.Ring(2)))
    cases = {
        "sync": (GossipStrategy(), WithBatchNorm(), {"sync_batchnorm": True}),
        "wrapped": (GossipStrategy(), wrapped, {}),
    }
    errors = {}
    for name, (strategy, module, options) in cases.items():
        try:
            fit(folder, strategy, 1, module, **options)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_modules_that_communicate_by_themselves_are_refused(ranks, tmp_path):
    first, second = ranks.run(2, run, "fail", str(tmp_path))
    assert first == second
    assert first == {
        "sync": "ValueError: sync_batchnorm must be False with GossipStrategy, got True: it would "
        "wait for all ranks in every forward; statistics are each rank's own, averaged in "
        "validation",
        "wrapped": "TypeError: `model` must be a `LightningModule` or "
        "`torch._dynamo.OptimizedModule`, got `GossipDataParallel`",
    }
