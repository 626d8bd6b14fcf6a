"""transformers' ``Trainer`` with our subclasses trains as the same loop written by hand."""

import contextlib
import copy
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.libraries import load
from pyparallel import SGP, GossipDataParallel, topology
from pyparallel.compression import ErrorFeedback, TopK
from pyparallel.gossip import AllReduce
from tests.integrations.by_hand import checks, compressed_ddp
from tests.launched import forget_accelerate, launched

transformers = load("transformers")

from pyparallel.integrations.transformers import CompressedTrainer, GossipTrainer, check_ranks  # noqa: E402

NUM_BATCHES, BATCH_SIZE, LENGTH = 6, 2, 8


def make_model(**options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def samples():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (2 * NUM_BATCHES * BATCH_SIZE, LENGTH), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


class Losses(transformers.TrainerCallback):
    """Keep what is logged."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


def make_trainer(kind, folder, epochs, model=None, **options):
    forget_accelerate()
    own = {key: options.pop(key) for key in ("algorithm", "compressor") if key in options}
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        logging_first_step=True,
        eval_strategy="epoch",
        save_strategy=options.pop("save_strategy", "epoch"),
        ddp_find_unused_parameters=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        train_sampling_strategy="sequential",
        optim="sgd",
        **options,
    )
    losses = Losses()
    trainer = kind(
        model=make_model() if model is None else model,
        args=arguments,
        train_dataset=samples(),
        eval_dataset=samples(),
        callbacks=[losses],
        **own,
    )
    return trainer, losses


def run(rank, check, folder):
    return launched(globals()[check])(rank, folder)


def by_hand(rank, wrap, epochs, accumulated=1, dtype=None):
    """Return the ranks' mean losses, and the model, of the same run without a Trainer."""
    module = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, means = wrap(module, optimizer), []
    batches = [
        torch.stack([each["input_ids"] for each in samples()[begin : begin + BATCH_SIZE]])
        for begin in range(0, len(samples()), BATCH_SIZE)
    ][rank::2]
    for _ in range(epochs):
        total = torch.zeros(())
        for index, batch in enumerate(batches, 1):
            with model.no_sync() if index % accumulated else contextlib.nullcontext():
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    # The Trainer divides by the labels of all ranks and accumulated batches.
                    num_labels = torch.tensor(2 * accumulated * BATCH_SIZE * LENGTH)
                    loss = 2 * model(batch, labels=batch, num_items_in_batch=num_labels).loss
                total += loss.detach().float()
                loss.backward()
            if index % accumulated == 0:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(total)
                means.append(total.item() / 2)
                total = torch.zeros(())
    return means, module, model


def assert_close(found, expected):
    """The Trainer divides by the tokens of all ranks, so sums are rounded elsewhere."""
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5, msg=key)


def losses_of(callback):
    return [each["loss"] for each in callback.logs if "loss" in each]


OVERLAPPED = SGP(topology.Ring, overlap=1)
PLAIN = [(OVERLAPPED, {}, {})]
OPTIONS = [
    (AllReduce(), {"gradient_accumulation_steps": 2}, {"accumulated": 2}),
    (OVERLAPPED, {"bf16": True}, {"dtype": torch.bfloat16}),
]


def check_options(rank, folder):
    check_gossip(rank, folder, OPTIONS)


def check_gossip(rank, folder, cases=PLAIN):
    for algorithm, options, arguments in cases:

        def wrap(module, optimizer, algorithm=algorithm):
            return GossipDataParallel(module, optimizer, algorithm)

        expected, _, reference = by_hand(rank, wrap, 2, **arguments)
        with reference.consensus():
            weights = copy.deepcopy(reference.state_dict())
        trainer, callback = make_trainer(
            GossipTrainer, folder, 2, algorithm=algorithm, save_strategy="no", **options
        )
        trainer.train()
        tolerance = 1e-2 if "dtype" in arguments else 1e-5  # bfloat16 rounds what sums differ in
        assert losses_of(callback) == pytest.approx(expected, rel=tolerance)
        if "dtype" not in arguments:
            assert_close(trainer.model.state_dict(), weights)
        assert trainer.gossip.bytes_sent == reference.bytes_sent > 0
        logged = [each for each in callback.logs if "loss" in each][-1]
        assert logged["rank/bytes_sent"] == trainer.gossip.bytes_sent


def check_gossip_resumes(rank, folder):
    whole, callback = make_trainer(GossipTrainer, folder, 2, algorithm=OVERLAPPED)
    whole.train()
    path = f"{folder}/checkpoint-{NUM_BATCHES}"
    evaluated = [each["eval_loss"] for each in callback.logs if "eval_loss" in each]
    for resume in (path, f"{folder}/checkpoint-{2 * NUM_BATCHES}"):
        trainer, again = make_trainer(GossipTrainer, folder, 2, algorithm=OVERLAPPED)
        trainer.train(resume_from_checkpoint=resume)
        if resume == path:
            assert losses_of(again) == losses_of(callback)[NUM_BATCHES:]
            assert trainer.evaluate()["eval_loss"] == evaluated[-1]
        for found, expected in zip(
            trainer.model.parameters(), whole.model.parameters(), strict=True
        ):
            assert torch.equal(found, expected)
    saved = transformers.GPT2LMHeadModel.from_pretrained(path)
    trainer.model.load_state_dict(saved.state_dict())
    assert trainer.evaluate()["eval_loss"] == evaluated[0]  # of the consensus that was saved
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{path}/gossip")
    dist.barrier()
    with pytest.raises(ValueError, match="ranks 0-1"):
        make_trainer(GossipTrainer, folder, 2, algorithm=OVERLAPPED)[0].train(
            resume_from_checkpoint=path
        )


def check_best(rank, folder):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    trainer, _ = make_trainer(GossipTrainer, folder, 2, algorithm=OVERLAPPED, **options)
    trainer.train()
    saved = transformers.GPT2LMHeadModel.from_pretrained(trainer.state.best_model_checkpoint)
    for found, expected in zip(trainer.model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


class Adapted(nn.Module):
    """A frozen model and a trained addition to its logits: what peft puts around a model."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model.requires_grad_(False)
        self.adapter, self.config = nn.Linear(32, 32), model.config

    def get_base_model(self):
        return self.base_model.model

    def forward(self, input_ids, **kwargs):
        outputs = self.base_model.model(input_ids, **kwargs)
        outputs.logits = outputs.logits + self.adapter(outputs.logits)
        return outputs


def smoothed(model, folder, algorithm=None, **options):
    """Return the trainer that has trained a model with label smoothing: DDP's without algorithm."""
    own = {} if algorithm is None else {"algorithm": algorithm}
    kind = GossipTrainer if own else transformers.Trainer
    trainer, _ = make_trainer(
        kind, folder, 1, model=model, label_smoothing_factor=0.1, max_grad_norm=0, **own, **options
    )
    trainer.train()
    return trainer


def check_smoothing(rank, folder):
    """Shift labels as Trainer does, which asks the class of a model, and of one in an adapter."""
    is_adapted = mock.patch.object(
        transformers.trainer, "_is_peft_model", lambda model: isinstance(model, Adapted)
    )
    with is_adapted:
        for make in (make_model, lambda: Adapted(make_model(tie_word_embeddings=False))):
            expected = smoothed(make(), folder, save_strategy="no").model.state_dict()
            trainer = smoothed(make(), folder, AllReduce(), save_strategy="no")
            assert_close(trainer.model.state_dict(), expected)
        trainer = smoothed(make(), folder, OVERLAPPED)
    saved = load("safetensors.torch").load_file(
        f"{folder}/checkpoint-{NUM_BATCHES}/model.safetensors"
    )
    assert_close(saved, trainer.model.state_dict())
    begun = make().state_dict()
    for key, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, begun[key]) == (not key.startswith("adapter")), key


def check_peft(rank, folder):
    """Train a LoRA of peft, and save its adapter, as Trainer does; without peft see above."""
    peft = load("peft")

    def make():
        torch.manual_seed(0)
        return peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["c_attn"]))

    expected = smoothed(make(), folder, save_strategy="no").model.state_dict()
    trainer = smoothed(make(), folder, AllReduce())
    assert_close(trainer.model.state_dict(), expected)
    saved = peft.PeftModel.from_pretrained(make_model(), f"{folder}/checkpoint-{NUM_BATCHES}")
    assert_close(saved.state_dict(), expected)


def check_compressed(rank, folder):
    compressor = ErrorFeedback(TopK(0.25))
    states = []

    def wrap(module, optimizer):
        ddp, state = compressed_ddp(module, compressor)
        states.append(state)
        return ddp

    expected, module, _ = by_hand(rank, wrap, 2)
    whole, callback = make_trainer(CompressedTrainer, folder, 2, compressor=compressor)
    whole.train()
    assert losses_of(callback) == pytest.approx(expected, rel=1e-5)
    assert_close(whole.model.state_dict(), module.state_dict())
    sent = whole.compression.metrics()["rank/bytes_sent"]
    assert sent == states[0].metrics()["rank/bytes_sent"] > 0
    trainer, again = make_trainer(CompressedTrainer, folder, 2, compressor=compressor)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{NUM_BATCHES}")
    assert losses_of(again) == losses_of(callback)[NUM_BATCHES:]


def check_refusals(rank, folder):
    trainer = make_trainer(CompressedTrainer, folder, 1)[0]
    trainer.args.fsdp = "full_shard"
    with pytest.raises(ValueError, match="a whole model on each rank, got args with fsdp"):
        check_ranks(trainer)

    class Both(GossipTrainer, CompressedTrainer):
        pass

    with pytest.raises(TypeError, match="Both must be a GossipTrainer or a CompressedTrainer"):
        make_trainer(Both, folder, 1, algorithm=OVERLAPPED)
    with pytest.raises(ValueError, match=r"algorithm must be an object .* got Ring\(2\)"):
        make_trainer(GossipTrainer, folder, 1, algorithm=topology.Ring(2))[0].train()
    with pytest.raises(ValueError, match=r"compressor must be an object .* got Ring\(2\)"):
        make_trainer(CompressedTrainer, folder, 1, compressor=topology.Ring(2))[0].train()


@checks("gossip", "options", "gossip_resumes", "best", "smoothing", "compressed", "refusals")
def test_the_trainer_trains_as_the_loop_by_hand(ranks, tmp_path, check):
    ranks.run(2, run, f"check_{check}", str(tmp_path))


@pytest.mark.slow
def test_an_adapter_of_peft_is_trained_and_saved(ranks, tmp_path):
    pytest.importorskip("peft")  # check_smoothing has one of our own
    ranks.run(2, run, "check_peft", str(tmp_path))


def check_alone(rank, folder):
    for kind, own in ((GossipTrainer, {"algorithm": OVERLAPPED}), (CompressedTrainer, {})):
        with pytest.raises(ValueError, match=f"{kind.__name__} must have at least 2 ranks, got 1"):
            make_trainer(kind, folder, 1, **own)


def test_one_process_is_refused(ranks, tmp_path):
    ranks.run(1, check_alone, str(tmp_path))
