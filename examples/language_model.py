"""Train GPT-2 or Llama on many ranks: one loop for each recipe, on CPUs and on GPUs.

    torchrun --standalone --nproc-per-node 2 examples/language_model.py --recipe gossip
    torchrun --standalone --nproc-per-node 2 examples/language_model.py --recipe pipeline
    torchrun --standalone --nproc-per-node 4 examples/language_model.py --recipe mesh
    python -m pyparallel watch runs/language_model/gossip

A recipe is a file in examples/recipes, or one of yours; every key of it is a flag too. The text is
Python's own source, as bytes, or that of --text. --resume goes on from the last checkpoint.
"""

import dataclasses
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from data import as_tensor, cut_windows, draw_windows, load_files
from methods import METHODS, next_token_loss
from pyparallel.integrations.metrics_log import MetricsLog
from ranks import gather, join_ranks, log_metrics
from recipe import Recipe, read_options

HELD_OUT_WINDOWS = 32


def main():
    recipe, options = read_options(__doc__)
    device = join_ranks(options.seed)
    corpus = Corpus(recipe)
    model = build_model(recipe, corpus.vocabulary).to(device)
    size = sum(each.numel() for each in model.parameters())
    training = METHODS[recipe.method](model, recipe)
    draw = torch.Generator().manual_seed(options.seed + 1000 * training.replica)
    resumes = options.resume
    first = load(training, draw, recipe, options.out) if resumes else begin(options.out)
    if dist.get_rank() == 0:
        whole = build_model(recipe, corpus.vocabulary).to(device)  # for samples, and to be saved
        print(f"{recipe.model} of {size / 1e6:.1f} M parameters by {options.recipe}, ", end="")
        print(f"{dist.get_world_size()} ranks, {len(corpus.train) / 1e6:.1f} M tokens of text\n")
        print("  step    loss   tokens/s   bits sent a parameter and step", flush=True)

    meter = Meter(training, size)
    with MetricsLog(options.out) as log:
        for step in range(first + 1, recipe.steps + 1):
            ids = draw_windows(corpus.train, recipe.batch, recipe.context, draw)
            loss = training.step(ids.to(device))
            meter.count(loss, ids.numel())
            if step == 1 or step % recipe.log_every == 0:
                metrics = training.metrics() | {"loss": loss}
                metrics = {name: value for name, value in metrics.items() if value is not None}
                log.write(step, metrics)
                log_metrics(options.tensorboard, options.recipe, metrics, step)
                meter.show(step)
            if step % recipe.sample_every == 0 or step == recipe.steps:
                state = training.whole_state()  # all ranks together; rank 0 has it
                if dist.get_rank() == 0:
                    whole.load_state_dict(state)
                    show_sample(whole, corpus, step)
                meter.restart()
            if step % recipe.save_every == 0 or step == recipe.steps:
                save(step, training, draw, recipe, options.out)
                meter.restart()
    if dist.get_rank() == 0:
        disable_progress_bar()
        whole.save_pretrained(options.out / "model")
        corpus.save_tokenizer(options.out / "model")
        print(f"The trained model, for from_pretrained: {options.out / 'model'}")
    dist.destroy_process_group()


class Corpus:
    """A text as tokens, its last part held out, and how tokens become text again."""

    def __init__(self, recipe: Recipe) -> None:
        self.tokenizer, self.vocabulary = None, 256
        if recipe.text:
            data = Path(recipe.text).read_bytes()
            parts = [data[: len(data) * 19 // 20]], [data[len(data) * 19 // 20 :]]
        else:
            parts = load_files()
        if recipe.tokenizer:
            self.tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
            self.vocabulary = len(self.tokenizer)
        self.train, held_out = map(self.encode, parts)
        self.held_out = cut_windows(held_out, HELD_OUT_WINDOWS, recipe.context)

    def encode(self, files: list[bytes]) -> Tensor:
        if self.tokenizer is None:
            return as_tensor(files)
        texts = [file.decode(errors="replace") for file in files]
        return torch.tensor([each for ids in self.tokenizer(texts).input_ids for each in ids])

    def decode(self, ids: Tensor) -> str:
        if self.tokenizer is None:
            return bytes(ids.tolist()).decode(errors="replace")
        return self.tokenizer.decode(ids)

    def save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def build_model(recipe: Recipe, vocabulary: int) -> nn.Module:
    """Return a model of Hugging Face's with random weights, the same on all ranks."""
    common = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    if recipe.model == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                **common,
                hidden_size=recipe.width,
                intermediate_size=8 * recipe.width // 3,
                num_hidden_layers=recipe.layers,
                num_attention_heads=recipe.heads,
                max_position_embeddings=recipe.context,
            )
        )
    sizes = {"n_embd": recipe.width, "n_layer": recipe.layers, "n_head": recipe.heads}
    undropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**common, **sizes, **undropped, n_positions=recipe.context))


class Meter:
    """Loss, speed and bytes of all ranks since the last line."""

    def __init__(self, training: Any, size: int) -> None:
        self.training, self.size = training, size
        self.restart()

    def restart(self) -> None:
        """Begin again, after what is no training."""
        self.losses, self.tokens, self.steps = [], 0, 0
        self.sent, self.begin = self.bytes_sent(), time.perf_counter()

    def bytes_sent(self) -> float:
        metrics = self.training.metrics()
        return sum(metrics.get(f"rank/bytes_sent{to}", 0.0) for to in ("", "_to_replicas"))

    def count(self, loss: float | None, tokens: int) -> None:
        self.steps += 1
        if loss is not None:  # of a pipeline, on the rank of the last stage
            self.losses.append(loss)
            self.tokens += tokens

    def show(self, step: int) -> None:
        """Print a line on rank 0, of all ranks."""
        ranks = gather((self.losses, self.tokens, self.bytes_sent() - self.sent))
        losses = [loss for each, _, _ in ranks for loss in each]
        speed = sum(tokens for _, tokens, _ in ranks) / (time.perf_counter() - self.begin)
        sent = sum(sent for *_, sent in ranks) / len(ranks)
        bits = 8 * sent / (self.size * self.steps)
        if dist.get_rank() == 0:
            print(
                f"{step:6}  {sum(losses) / len(losses):6.3f}  {speed:9,.0f}   {bits:.2f}",
                flush=True,
            )
        self.restart()


@torch.no_grad()
def show_sample(model: Any, corpus: Corpus, step: int) -> None:
    """Print the held-out loss and a text that the model has written."""
    model.eval()
    windows = corpus.held_out.to(model.device).split(1)  # logits of all at once may be too large
    loss = sum(next_token_loss(model(each).logits, each).item() for each in windows) / len(windows)
    torch.manual_seed(step)
    prompt = corpus.encode([b"def "])[None].to(model.device)
    length = corpus.held_out.shape[1]
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=0.8,
        max_length=length, min_length=length,
    )  # fmt: skip
    print(f"\n  held-out loss {loss:.3f}, {loss / math.log(2):.2f} bits a token; a sample:")
    for line in corpus.decode(ids[0]).splitlines():
        print(f"  | {line}")
    print()


def begin(folder: Path) -> int:
    """Give the folder of an earlier run another name, so that none of it is lost; return step 0."""
    if dist.get_rank() == 0 and any(folder.glob("step-*")):
        names = (Path(f"{folder}.{number}") for number in itertools.count(1))
        print(
            f"The earlier run is now in {folder.rename(next(p for p in names if not p.exists()))}"
        )
    dist.barrier()
    return 0


def save(step: int, training: Any, draw: torch.Generator, recipe: Recipe, folder: Path) -> None:
    """Write a file of each rank; the step's folder has its name once all are complete."""
    state = {"step": step, "training": training.state_dict(), "draw": draw.get_state()}
    state["recipe"] = dataclasses.asdict(recipe)
    new, complete = folder / "checkpoint.new", folder / f"step-{step:07}"
    new.mkdir(parents=True, exist_ok=True)
    torch.save(state, new / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt")
    dist.barrier()
    if dist.get_rank() == 0 and not complete.exists():
        new.rename(complete)
    dist.barrier()


def load(training: Any, draw: torch.Generator, recipe: Recipe, folder: Path) -> int:
    """Load the last checkpoint of this rank; return its step."""
    found = sorted(folder.glob("step-*"))
    if not found:
        sys.exit(f"--resume needs a checkpoint, got none in {folder}: start without --resume")
    path = found[-1] / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
    if not path.exists():
        sys.exit(f"--resume needs as many ranks as have saved {found[-1]}, which lacks {path.name}")
    state = torch.load(path, map_location="cpu")
    for key, value in dataclasses.asdict(recipe).items():
        may_differ = key == "steps" or key.endswith("_every")
        if not may_differ and value != state["recipe"][key]:
            saved = state["recipe"][key]
            sys.exit(
                f"--resume needs the recipe of {found[-1]}, whose {key} is {saved}, got {value}"
            )
    if dist.get_rank() == 0:
        print(f"Going on after step {state['step']}, from {found[-1]}")
    training.load_state_dict(state["training"])
    draw.set_state(state["draw"])
    return state["step"]


if __name__ == "__main__":
    main()
