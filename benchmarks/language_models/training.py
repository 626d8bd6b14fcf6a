"""Hugging Face's models with random weights, and a training of one, unsplit or in a pipeline."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

from benchmarks.harness.learning_rate import decayed
from benchmarks.harness.libraries import load
from benchmarks.harness.rows import Row, as_text, shorten
from benchmarks.pipeline.tasks import load_text
from examples.data import cut_windows, draw_windows
from pyparallel import pipeline

BITS_PER_NAT = 1 / math.log(2)
BATCH, WARM_UP = 8, 0.1  # windows of an update; the part of the updates with a rising rate
COMMON = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def build_gpt2(length: int, width: int = 384, num_layers: int = 6, num_heads: int = 6) -> nn.Module:
    transformers = load("transformers")
    sizes = {"n_positions": length, "n_embd": width, "n_layer": num_layers, "n_head": num_heads}
    undropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # for equal losses
    config = transformers.GPT2Config(**COMMON, **sizes, **undropped)
    return transformers.GPT2LMHeadModel(config)


def build_llama(length: int) -> nn.Module:
    transformers = load("transformers")
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    others = {"num_attention_heads": 6, "max_position_embeddings": length}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, **sizes, **others))


MODELS: dict[str, Callable[[int], nn.Module]] = {"GPT-2": build_gpt2, "Llama": build_llama}


def adamw(rate: float, parameters: Sequence[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=rate)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross-entropy of each byte but the first of a window, in nats."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Training:
    """A training of a model, which is built for a length."""

    build: Callable[[int], nn.Module]
    schedule: pipeline.Schedule | None  # None: unsplit, in a plain loop with two threads
    microbatches: int
    split: Sequence[int]  # layer 0 is the embedding, the last the head
    length: int  # bytes of a window
    held_out: int  # windows
    steps: int
    rate: float
    seed: int
    make_optimizers: Callable[[float, Sequence[nn.Parameter]], Any] = adamw
    max_norm: float | None = None
    replicas: Any = None  # two of the pipeline, and how they are averaged
    correction: pipeline.Correction | None = None

    def run(self, rank: int = 0) -> Row | None:
        """Train on a rank; return the columns of its row on that of the last stage, else None."""
        torch.manual_seed(self.seed)
        model: Any = self.build(self.length)
        text, held_out = load_text()[0], cut_windows(load_text()[1], self.held_out, self.length)
        mesh = None
        if self.replicas is not None:
            shape = 2, dist.get_world_size() // 2
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "stage"))
        replica = 0 if mesh is None else mesh.get_local_rank("replicate")
        train = self._train_unsplit if self.schedule is None else partial(self._train_split, mesh)
        batches = islice(self._batches(text, replica), self.steps)
        losses, seconds, final = train(model, batches, held_out)
        if final is None:
            return None
        bits = [loss * BITS_PER_NAT for loss in losses]
        return {
            "rate": f"{self.rate:g}",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
            "microbatches": self.microbatches,
            "batch": BATCH,
            "length": self.length,
            "steps": self.steps,
            "training_bits": f"{statistics.fmean(bits[len(bits) * 9 // 10 :]):.5f}",
            "held_out_bits": f"{final * BITS_PER_NAT:.5f}",
            "losses": as_text(shorten([bits])),
            "seconds": f"{seconds:.1f}",
            "transformers": load("transformers").__version__,
        }

    def _batches(self, text: Tensor, replica: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1000 * replica)
        while True:
            yield draw_windows(text, BATCH, self.length, generator)

    def _scheduler(self, optimizer: Optimizer) -> Any:
        return decayed(optimizer, self.steps, WARM_UP)

    def _train_unsplit(
        self, model: Any, batches: Iterator[Tensor], held_out: Tensor
    ) -> tuple[list[float], float, float]:
        """Return the losses, the seconds of all steps, and the held-out loss."""
        torch.set_num_threads(2)
        optimizer = self.make_optimizers(self.rate, list(model.parameters()))
        scheduler, losses = self._scheduler(optimizer), []
        begin = time.perf_counter()
        for ids in batches:
            loss = next_token_loss(model(ids, use_cache=False).logits, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - begin
        with torch.no_grad():
            return losses, seconds, float(next_token_loss(model.eval()(held_out).logits, held_out))

    def _train_split(
        self, mesh: DeviceMesh | None, model: Any, batches: Iterator[Tensor], held_out: Tensor
    ) -> tuple[list[float], float, float | None]:
        """Return the same on the rank of the last stage; on others no held-out loss."""
        trainer = pipeline.PipelineTrainer(
            pipeline.split_model(model),
            next_token_loss,
            partial(self.make_optimizers, self.rate),
            self.schedule,
            num_microbatches=self.microbatches,
            split=self.split,
            scheduler_fn=self._scheduler,
            max_norm=self.max_norm,
            correction=self.correction,
            mesh=mesh,
            replicas=self.replicas,
        )
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        losses = [trainer.step(ids, target=ids) for ids in batches]
        trainer.flush()
        seconds = time.perf_counter() - begin
        with trainer.consensus():
            final = trainer.evaluate(held_out, target=held_out)
        is_last = trainer.stages[-1].index == len(self.split)
        return losses, seconds, final if is_last else None
