"""``python -m benchmarks.language_models.bench [--steps 200]``.

Hugging Face's GPT-2, its embedding tied to the head, and Llama, each of more than 10 million
parameters, from random weights: unsplit in a plain loop with two threads, and on two gloo ranks
with a thread each under ``OneForwardOneBackward`` and ``PipeOptim``. All have the same initial
weights, batches, learning rates and updates: AdamW, an update for each batch of 8 windows of 128
bytes of Python's standard library, warm-up over the first tenth, cosine decay. A batch is four
microbatches of ``OneForwardOneBackward`` and one of ``PipeOptim``, which updates after each.

Rows go to ``benchmarks/results/language-models-<machine>.csv``, each as soon as it is measured.
"""

import math
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from benchmarks.harness.learning_rate import decayed
from benchmarks.harness.libraries import load
from benchmarks.harness.program import make_parser
from benchmarks.harness.ranks import run_on_loopback
from benchmarks.harness.rows import RESULTS, Row, as_text, machine, replace_rows, shorten, stamp
from benchmarks.language_models.table import UNSPLIT, markdown
from benchmarks.pipeline.tasks import load_text
from examples.data import cut_windows, draw_windows
from pyparallel import pipeline

FIELDS = [
    "model", "schedule", "seed", "rate", "parameters", "tied", "ranks", "threads", "microbatches",
    "batch", "length", "steps", "training_bits", "held_out_bits", "losses",
    "torch", "transformers", "commit",
]  # fmt: skip
BITS_PER_NAT = 1 / math.log(2)
BATCH, LENGTH, HELD_OUT = 8, 128, 64  # windows, bytes of a window, held-out windows
RATE, WARM_UP = 1e-3, 0.1
SPLIT = [4]  # the embedding and three of six blocks
CONTESTANTS: dict[str, tuple[pipeline.Schedule, int]] = {  # with the microbatches of a batch
    "OneForwardOneBackward": (pipeline.OneForwardOneBackward(), 4),
    "PipeOptim": (pipeline.PipeOptim(), 1),
}


def build_gpt2(length: int = LENGTH) -> nn.Module:
    transformers = load("transformers")
    sizes = {"n_positions": length, "n_embd": 384, "n_layer": 6, "n_head": 6}
    undropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # for equal losses
    config = transformers.GPT2Config(**COMMON, **sizes, **undropped)
    return transformers.GPT2LMHeadModel(config)


def build_llama(length: int = LENGTH) -> nn.Module:
    transformers = load("transformers")
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    others = {"num_attention_heads": 6, "max_position_embeddings": length}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, **sizes, **others))


COMMON = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
MODELS = {"GPT-2": build_gpt2, "Llama": build_llama}


def batches(seed: int, length: int = LENGTH) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield draw_windows(load_text()[0], BATCH, length, generator)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross-entropy of each byte but the first of a window, in nats."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train_unsplit(rank: int, name: str, steps: int, seed: int) -> Row:
    del rank
    torch.set_num_threads(2)
    torch.manual_seed(seed)
    model: Any = MODELS[name]()
    optimizer = AdamW(model.parameters(), lr=RATE)
    scheduler, losses = decayed(optimizer, steps, WARM_UP), []
    load_text()
    for ids in islice(batches(seed), steps):
        loss = next_token_loss(model(ids, use_cache=False).logits, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    held_out = cut_windows(load_text()[1], HELD_OUT, LENGTH)
    with torch.no_grad():
        final = float(next_token_loss(model.eval()(held_out).logits, held_out))
    return columns_of(model, losses, final)


def train_split(rank: int, name: str, schedule: str, steps: int, seed: int) -> Row | None:
    torch.manual_seed(seed)
    model = MODELS[name]()
    trainer = pipeline.PipelineTrainer(
        pipeline.split_model(model),
        next_token_loss,
        partial(AdamW, lr=RATE),
        CONTESTANTS[schedule][0],
        num_microbatches=CONTESTANTS[schedule][1],
        split=SPLIT,
        scheduler_fn=partial(decayed, steps=steps, warm_up=WARM_UP),
    )
    load_text()
    losses = [trainer.step(ids, target=ids) for ids in islice(batches(seed), steps)]
    trainer.flush()
    held_out = cut_windows(load_text()[1], HELD_OUT, LENGTH)
    final = trainer.evaluate(held_out, target=held_out)
    if final is None:
        return None
    return columns_of(model, [loss for loss in losses if loss is not None], final)


def columns_of(model: Any, losses: list[float], held_out: float) -> Row:
    sizes = {parameter: parameter.numel() for parameter in model.parameters()}
    bits = [loss * BITS_PER_NAT for loss in losses]
    return {
        "parameters": sum(sizes.values()),
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "training_bits": f"{statistics.fmean(bits[len(bits) * 9 // 10 :]):.5f}",
        "held_out_bits": f"{held_out * BITS_PER_NAT:.5f}",
        "losses": as_text(shorten([bits])),
    }


def row_of(name: str, schedule: str, steps: int, seed: int) -> Row:
    """Train once and return the row."""
    limit, of_run = 60 + 10.0 * steps, (steps, seed)
    if schedule == UNSPLIT:
        ranks, microbatches = 1, 1
        (columns,) = run_on_loopback(1, limit, train_unsplit, name, *of_run)
    else:
        ranks, microbatches = 2, CONTESTANTS[schedule][1]
        _, columns = run_on_loopback(2, limit, train_split, name, schedule, *of_run)
    columns |= {"model": name, "schedule": schedule, "seed": seed, "steps": steps}
    columns |= {"ranks": ranks, "threads": 2 // ranks, "microbatches": microbatches}
    columns |= {"rate": f"{RATE:g}", "batch": BATCH, "length": LENGTH}
    return {**columns, "transformers": load("transformers").__version__, **stamp()}


def main() -> None:
    parser = make_parser("language_models.bench", __doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    path = options.out or RESULTS / f"language-models-{machine()}.csv"
    rows = []
    for name in options.model:
        for schedule in (UNSPLIT, *CONTESTANTS):
            rows.append(row_of(name, schedule, options.steps, options.seed))
            replace_rows(rows[-1:], path, FIELDS, ["model", "schedule", "seed"])
            print(name, schedule, rows[-1]["held_out_bits"], "bits", flush=True)
    print(markdown([{name: str(each) for name, each in row.items()} for row in rows]))
    print(f"rows: {path}")


if __name__ == "__main__":
    main()
