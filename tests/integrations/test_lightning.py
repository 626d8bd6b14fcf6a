"""Lightning's ``Trainer`` with our strategies trains as the same loop written by hand."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.harness.libraries import load
from pyparallel import SGP, GossipDataParallel, topology
from pyparallel.compression import ErrorFeedback, Int8, TopK
from pyparallel.gossip import AllReduce
from tests.integrations.by_hand import assert_equal, checks, compressed_ddp, train
from tests.launched import launched

L = load("lightning")
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from pyparallel.integrations.lightning import CompressedDDPStrategy, GossipStrategy  # noqa: E402

NUM_BATCHES, BATCH_SIZE = 6, 4


class AutoEncoder(L.LightningModule):
    """That of Lightning's quick start, which also keeps what it is told."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 8))
        self.losses, self.validation, self.metrics = [], [], {}

    def forward(self, inputs):
        return self.decoder(self.encoder(inputs))

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[0])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log_dict(self.trainer.strategy.metrics())
        return loss

    def validation_step(self, batch, batch_idx):
        self.validation.append(self.loss(batch).item())

    def on_train_epoch_end(self):
        self.metrics = self.trainer.strategy.metrics()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Alternating(AutoEncoder):
    """Two optimizers, which Lightning leaves to the module."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for each in self.optimizers():
            each.zero_grad()
        self.manual_backward(loss)
        for each in self.optimizers():
            each.step()

    def configure_optimizers(self):
        return make_several(self)


def make_several(module):
    first = torch.optim.SGD(module.encoder.parameters(), lr=0.1, momentum=0.9)
    return [first, torch.optim.Adam(module.decoder.parameters(), lr=0.05)]


def samples():
    return torch.rand(2 * NUM_BATCHES * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(1))


def fit(folder, strategy, epochs, module=None, resume=None, **options):
    module = module or AutoEncoder()
    options = {"enable_progress_bar": False, "enable_model_summary": False, "devices": 2, **options}
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        default_root_dir=folder,
        **{"num_sanity_val_steps": 0, **options},
    )
    loader = DataLoader(TensorDataset(samples()), BATCH_SIZE)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer, module


def batches_of(rank, epoch=None):
    """Return a rank's batches: in order for validation, shuffled as Lightning does in an epoch."""
    sampler = DistributedSampler(range(len(samples())), 2, rank, shuffle=epoch is not None)
    sampler.set_epoch(epoch or 0)
    return samples()[list(sampler)].split(BATCH_SIZE)


def by_hand(rank, algorithm, epochs, make_optimizer=None, dtype=None, **options):
    """Return losses, validation's losses, the last consensus and the bytes, without Lightning."""
    module = AutoEncoder()
    optimizer = (make_optimizer or AutoEncoder.configure_optimizers)(module)
    model = GossipDataParallel(module, optimizer, algorithm)
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    losses, validation = [], []
    for epoch in range(epochs):
        losses += train(model, several, batches_of(rank, epoch), dtype=dtype, **options)
        with model.consensus() as averaged, torch.no_grad():
            for batch in batches_of(rank):
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    validation.append(nn.functional.mse_loss(averaged(batch), batch).item())
    model.flush()
    with model.consensus() as averaged:
        weights = copy.deepcopy(model.state_dict())
    return losses, validation, weights, model.metrics()["rank/bytes_sent"]


def check_gossip(rank, folder, overlaps=(1,)):
    for overlap in overlaps:
        expected, validation, weights, sent = by_hand(
            rank, SGP(topology.Ring(2), overlap=overlap), epochs=2
        )
        strategy = GossipStrategy(SGP(topology.Ring, overlap=overlap))
        trainer, module = fit(f"{folder}/{overlap}", strategy, 2)
        assert module.losses == expected
        assert module.validation == validation
        assert module.metrics["rank/bytes_sent"] == sent > 0
        assert trainer.callback_metrics["rank/bytes_sent"] > 0
        assert module.metrics["rank/staleness"] == overlap
        assert_equal(module.state_dict(), weights)


def check_gossip_without_overlap(rank, folder):
    check_gossip(rank, folder, overlaps=(0,))


def check_checkpoints(rank, folder):
    for overlap in (0, 1):
        resume(f"{folder}/{overlap}", overlap)


def resume(folder, overlap):
    """Go on from the end of an epoch, from after ``fit``, and from the weights alone."""

    def strategy():
        return GossipStrategy(SGP(topology.Ring, overlap=overlap))

    expected = fit(f"{folder}/whole", strategy(), 2)[1]
    trainer, module = fit(folder, strategy(), 1)
    of_epoch, after = trainer.checkpoint_callback.best_model_path, f"{folder}/after.ckpt"
    trainer.save_checkpoint(after)
    for path in (of_epoch, after):
        resumed = fit(folder, strategy(), 2, resume=path)[1]
        assert resumed.losses == expected.losses[NUM_BATCHES:]
        assert_equal(resumed.state_dict(), expected.state_dict())
        assert_equal(AutoEncoder.load_from_checkpoint(path).state_dict(), module.state_dict())
        assert len(list(Path(path).parent.glob(f"{Path(path).name}.rank-?-of-2"))) == 2
    dist.barrier()
    trainer.strategy.remove_checkpoint(after)
    dist.barrier()
    assert not list(Path(folder).glob("after*"))


OPTIONS = [
    ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, {"accumulated": 2, "clip": 0.01}),
    ({"precision": "bf16-mixed"}, {"dtype": torch.bfloat16}),
]


def check_options(rank, folder):
    for algorithm in (SGP(topology.Ring, overlap=1), AllReduce()):
        for options, arguments in OPTIONS:
            expected = by_hand(rank, algorithm, 2, **arguments)
            module = fit(folder, GossipStrategy(algorithm), 2, **options)[1]
            assert (module.losses, module.validation) == expected[:2], (algorithm, options)
            assert_equal(module.state_dict(), expected[2])
    expected = by_hand(rank, SGP(topology.Ring(2)), 2, make_several)
    strategy = GossipStrategy(SGP(topology.Ring))
    module = fit(folder, strategy, 2, Alternating())[1]
    assert (module.losses, module.validation) == expected[:2]
    assert_equal(module.state_dict(), expected[2])


def train_compressed(rank, compressor, epochs):
    module = AutoEncoder()
    ddp, state = compressed_ddp(module, compressor)
    optimizer, losses = module.configure_optimizers(), []
    for epoch in range(epochs):
        losses += train(ddp, [optimizer], batches_of(rank, epoch))
    return losses, module.state_dict(), state.metrics()["rank/bytes_sent"]


def check_compressed(rank, folder):
    compressor = ErrorFeedback(TopK(0.25))
    losses, weights, sent = train_compressed(rank, compressor, 2)
    trainer, module = fit(folder, CompressedDDPStrategy(compressor), 2)
    assert module.losses == losses
    assert module.metrics["rank/bytes_sent"] == sent > 0
    assert_equal(module.state_dict(), weights)
    trainer = fit(folder, CompressedDDPStrategy(compressor), 1)[0]
    path = trainer.checkpoint_callback.best_model_path
    resumed = fit(folder, CompressedDDPStrategy(compressor), 2, resume=path)[1]
    assert resumed.losses == losses[NUM_BATCHES:]
    assert_equal(resumed.state_dict(), weights)


def check_scaler(rank, folder):
    """With a GradScaler whose first step overflows, nothing is lost and all ranks go on."""
    for strategy in (GossipStrategy(AllReduce()), CompressedDDPStrategy(Int8())):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        module = fit(folder, strategy, 1, plugins=plugin, limit_val_batches=0)[1]
        assert scaler.get_scale() < 2.0**120
        assert all(bool(p.isfinite().all()) for p in module.parameters())
        everywhere = [None] * 2
        dist.all_gather_object(everywhere, [p.tolist() for p in module.parameters()])
        assert everywhere[0] == everywhere[1]


def check_last_checkpoint(rank, folder):
    """Keep the files of one checkpoint, to which "last" is a link."""
    callback = L.pytorch.callbacks.ModelCheckpoint(folder, save_last="link")
    whole = fit(folder, GossipStrategy(), 2, callbacks=callback)[1]
    names = ["epoch=1-step=12.ckpt", *(f"epoch=1-step=12.ckpt.rank-{r}-of-2" for r in range(2))]
    assert sorted(each.name for each in Path(folder).glob("*")) == [*names, "last.ckpt"]
    dist.barrier()
    resumed = fit(f"{folder}/resumed", GossipStrategy(), 3, resume=callback.last_model_path)[1]
    losses = fit(f"{folder}/whole", GossipStrategy(), 3)[1].losses
    assert whole.losses + resumed.losses == losses
    dist.barrier()
    check_refused_checkpoints(rank, folder, callback.last_model_path)


class Logged(AutoEncoder):
    """One that logs as Lightning does by default: each rank its own value."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val", self.validation[-1] + (-1) ** self.trainer.current_epoch * self.global_rank)


def check_names(rank, folder):
    """A metric in the name of a checkpoint, of which each rank has another value."""
    expected = fit(f"{folder}/whole", GossipStrategy(), 4, Logged())[1]
    for strategy in (GossipStrategy, CompressedDDPStrategy):
        part = Path(folder, strategy.__name__)
        callback = L.pytorch.callbacks.ModelCheckpoint(
            part, "{epoch}-{val:.4f}", monitor="val", save_top_k=2
        )
        _, module = fit(f"{part}/log", strategy(), 3, Logged(), callbacks=callback)
        dist.barrier()
        kept = sorted(callback.best_k_models)  # of the first rank
        dist.broadcast_object_list(kept, 0)
        names = [Path(each).name for each in kept]
        names += [f"{each}.rank-{r}-of-2" for each in names for r in range(2)]
        assert sorted(each.name for each in part.glob("*.ckpt*")) == sorted(names)
        path = max(kept)
        done = NUM_BATCHES * (1 + int(Path(path).name[len("epoch=")]))
        resumed = fit(f"{part}/log", strategy(), 4, Logged(), resume=path)[1]
        assert resumed.losses[: len(module.losses) - done] == module.losses[done:]
        if strategy is GossipStrategy:
            assert_equal(resumed.state_dict(), expected.state_dict())


class Averaged(AutoEncoder):
    """One that keeps each rank's weights after each step, and those that are validated."""

    def __init__(self):
        super().__init__()
        self.steps, self.seen = [], []

    def on_train_batch_end(self, *arguments):
        self.steps.append(copy.deepcopy(self.state_dict()))

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if batch_idx == 0:
            self.seen.append(copy.deepcopy(self.state_dict()))


def check_ema(rank, folder):
    """Validate, save and keep the ranks' average of Lightning's EMA of each rank's weights."""
    for overlap in (0, 1):
        strategy = GossipStrategy(SGP(topology.Ring, overlap=overlap))
        ema = L.pytorch.callbacks.EMAWeightAveraging(decay=0.9)
        trainer, module = fit(f"{folder}/{overlap}", strategy, 2, Averaged(), callbacks=[ema])
        average, expected = None, []
        for index, weights in enumerate(module.steps, 1):
            if average is None:
                average = copy.deepcopy(weights)
            for key, tensor in weights.items():
                average[key].lerp_(tensor, 0.1)
            if index % NUM_BATCHES == 0:
                expected.append({key: tensor.clone() for key, tensor in average.items()})
                for tensor in expected[-1].values():
                    dist.all_reduce(tensor.div_(2))
        saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
        found = [*module.seen, module.state_dict(), saved["state_dict"]]
        expected += 2 * expected[-1:]
        for state, means in zip(found, expected, strict=True):
            torch.testing.assert_close(dict(state), means, rtol=0, atol=1e-6)


class OfHead(AutoEncoder):
    """One whose encoder a callback of Lightning unfreezes, and adds to the optimizer."""

    def __init__(self):
        super().__init__()
        self.backbone = self.encoder

    def configure_optimizers(self):
        return torch.optim.Adam(self.decoder.parameters(), lr=0.05)


def check_finetuning(rank, folder):
    """Train what a callback unfreezes, as the loop by hand does that wraps again."""
    module = AutoEncoder()
    module.encoder.requires_grad_(False)
    optimizer, algorithm = OfHead.configure_optimizers(module), SGP(topology.Ring(2), overlap=1)
    model = GossipDataParallel(module, optimizer, algorithm)
    losses = train(model, [optimizer], batches_of(rank, 0))
    with model.consensus() as averaged:
        weights = copy.deepcopy(averaged.state_dict())
    model.close()
    module.load_state_dict(weights)
    module.encoder.requires_grad_(True)
    optimizer.add_param_group({"params": [*module.encoder.parameters()], "lr": 0.01})
    model = GossipDataParallel(module, optimizer, algorithm)
    for epoch in (1, 2):
        losses += train(model, [optimizer], batches_of(rank, epoch))
    with model.consensus() as averaged:
        weights = copy.deepcopy(averaged.state_dict())

    def finetuned(epochs, resume=None):
        strategy = GossipStrategy(SGP(topology.Ring, overlap=1))
        unfreeze = L.pytorch.callbacks.BackboneFinetuning(
            1, lambda epoch: 1.0, backbone_initial_lr=0.01
        )
        saving = L.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        options = {"callbacks": [unfreeze, saving], "resume": resume}
        return fit(folder, strategy, epochs, OfHead(), **options)[1]

    module = finetuned(3)
    assert module.losses == losses
    assert_equal({k: v for k, v in module.state_dict().items() if "backbone" not in k}, weights)
    dist.barrier()
    for epoch in range(2):  # the second has the group that was added
        resumed = finetuned(3, f"{folder}/epoch={epoch}.ckpt")
        assert resumed.losses == losses[NUM_BATCHES * (epoch + 1) :]
        assert_equal(resumed.state_dict(), module.state_dict())


def check_refused_checkpoints(rank, folder, path):
    saved = torch.load(path, weights_only=False)
    other = f"{folder}/other-{rank}.ckpt"
    torch.save({**saved, "pyparallel_num_ranks": 4}, other)
    match = "ckpt_path must be of a run with 2 ranks, got one with 4"
    with pytest.raises(ValueError, match=match):
        fit(folder, GossipStrategy(), 2, resume=other)
    if rank == 1:
        Path(f"{path}").resolve().with_suffix(".ckpt.rank-1-of-2").unlink()
    dist.barrier()
    with pytest.raises(ValueError, match=r"rank 1.*rank-1-of-2"):
        fit(folder, GossipStrategy(), 2, resume=path)


def run(rank, check, folder):
    return launched(globals()[check])(rank, folder)


@checks(
    *("gossip", "gossip_without_overlap", "checkpoints", "options", "compressed", "scaler"),
    *("last_checkpoint", "names", "finetuning", "ema"),
)
def test_lightning_trains_as_the_loop_by_hand(ranks, tmp_path, check):
    ranks.run(2, run, f"check_{check}", str(tmp_path))


def fail(rank, folder):
    """Return the errors of strategies that cannot train."""
    cases = {
        "algorithm": GossipStrategy(topology.Ring(2)),
        "topology": GossipStrategy(SGP(topology.Hypercube(4))),
        "compressor": CompressedDDPStrategy(topology.Ring(2)),
    }
    errors = {}
    for name, strategy in cases.items():
        try:
            fit(folder, strategy, 1)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def test_mistakes_are_one_sentence_on_every_rank(ranks, tmp_path):
    first, second = ranks.run(2, run, "fail", str(tmp_path))
    assert first == second
    assert first == {
        "algorithm": "ArgumentTypeError: ranks 0-1: algorithm must be an object such as SGP(), got "
        "Ring(2); wrap it, SGP(Ring(2))",
        "topology": "DisagreementError: ranks 0-1: topology must be for the process group's 2 "
        "ranks, got Hypercube(4); leave it out for OnePeerExponential(2, peers=1)",
        "compressor": "ArgumentTypeError: ranks 0-1: compressor must be an object such as Int8() "
        "or TopK(0.01), got Ring(2)",
    }


def test_mistakes_before_there_are_ranks():
    for name in ("find_unused_parameters", "ddp_comm_hook"):
        with pytest.raises(TypeError, match=f"DistributedDataParallel, got {name}"):
            GossipStrategy(**{name: True})
    with pytest.raises(TypeError, match="must not be given ddp_comm_hook: DDP has one hook"):
        CompressedDDPStrategy(TopK(0.1), ddp_comm_hook=print)


def fail_alone(rank, folder):
    for strategy in ("gossip", "compressed_ddp"):
        with pytest.raises(ValueError, match="Strategy must have at least 2 ranks, got devices=1"):
            fit(folder, strategy, 1, devices=1)


def test_a_strategy_without_ranks_is_refused(ranks, tmp_path):
    ranks.run(1, run, "fail_alone", str(tmp_path))
