"""Jobs of DDP and FSDP2 with compression: every compressor, alone and with error feedback."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pyparallel.compression import (
    DGC,
    QSGD,
    Cast,
    Chain,
    Compressor,
    ConvAutoEncoder,
    ErrorFeedback,
    Fp8,
    Int4,
    Int8,
    Learned,
    Natural,
    PermK,
    PerParameter,
    PowerSGD,
    RandomK,
    Sign,
    Switch,
    Ternary,
    Threshold,
    TopK,
    compress_ddp,
    compress_fsdp,
    fsdp_all_gather,
    fsdp_reduce_scatter,
)
from tests.golden.job import Job, Result, listed
from tests.golden.models import Small, batch, plain_sgd, squared_error

NUM_RANKS = 2


class CompressedRun:
    """A training loop; subclasses wrap the model and choose what is saved."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self) -> None:
        self.losses: list[float] = []

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            inputs, targets = batch(step)
            self.optimizer.zero_grad()
            loss = squared_error(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def pause(self) -> None:
        pass


class DDPRun(CompressedRun):
    """Training with `compress_ddp`."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        self.model = DistributedDataParallel(Small())
        self.optimizer = plain_sgd(self.model.parameters())
        self.compression = compress_ddp(self.model, compressor)

    def save(self) -> Any:
        return {
            "model": self.model.module.state_dict(),
            "compression": self.compression.state_dict(),
        }

    def load(self, saved: Any, way: int) -> None:
        self.load_others(saved)
        self.compression.load_state_dict(saved["compression"])

    def load_others(self, saved: Any) -> None:
        self.model.module.load_state_dict(saved["model"])

    def finish(self) -> Result:
        return {"losses": self.losses, **listed(self.model.module.state_dict())}


class FSDPRun(CompressedRun):
    """Training with `compress_fsdp`, or with collectives set for single modules."""

    def __init__(self, attach: Callable[[nn.Module], dict[str, Any]]) -> None:
        super().__init__()
        self.model = Small()
        for module in (self.model.first, self.model):
            fully_shard(module, reshard_after_forward=False)
        self.optimizer = plain_sgd(self.model.parameters())
        self.compressions = attach(self.model)

    def _shards(self) -> dict[str, torch.Tensor]:
        tensors = self.model.state_dict().items()
        return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors}

    def save(self) -> Any:
        states = {name: each.state_dict() for name, each in self.compressions.items()}
        return {"shards": self._shards(), "compression": states}

    def load(self, saved: Any, way: int) -> None:
        self.load_others(saved)
        for name, each in self.compressions.items():
            each.load_state_dict(saved["compression"][name])

    @torch.no_grad()
    def load_others(self, saved: Any) -> None:
        for name, shard in self._shards().items():
            shard.copy_(saved["shards"][name])

    def finish(self) -> Result:
        return {"losses": self.losses, **listed(self._shards())}


def _ddp(compressor: Compressor, **options: Any) -> Job:
    return Job(lambda: DDPRun(compressor), **options)


def _fsdp(
    gradients: Compressor | None, parameters: Compressor | None = None, **options: Any
) -> Job:
    def attach(model: nn.Module) -> dict[str, Any]:
        return {"": compress_fsdp(model, gradients=gradients, parameters=parameters)}

    return Job(lambda: FSDPRun(attach), **options)


def _one_by_one(gradients: Compressor, parameters: Compressor) -> Job:
    def attach(model: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, module in (("first", model.first), ("all", model)):
            found[f"{name}, gradients"] = fsdp_reduce_scatter(gradients, name)
            found[f"{name}, parameters"] = fsdp_all_gather(parameters, name)
            module.set_custom_reduce_scatter(found[f"{name}, gradients"])
            module.set_custom_all_gather(found[f"{name}, parameters"])
        return found

    return Job(lambda: FSDPRun(attach))


SMALL_CODES = ConvAutoEncoder(channels=(2,), code_channels=1)

# Stateless compressors: the state holds their repr and the number of messages.
FORGETFUL = {
    "cast": Cast(),
    "cast-float16": Cast(torch.float16),
    "int8": Int8(),
    "int4": Int4(block_size=128),
    "fp8": Fp8(),
    "sign": Sign(),
    "top-k": TopK(0.25),
    "threshold": Threshold(0.5),
    "chain": Chain(TopK(0.25), Int8()),
    "per-parameter": PerParameter({"*.scale": Cast(), "*": TopK(0.25)}),
}
# Random draws that depend on the number of messages.
DRAWING = {
    "int8-seeded": Int8(block_size=64, seed=3),
    "fp8-seeded": Fp8("e5m2", seed=0),
    "qsgd": QSGD(),
    "qsgd-4": QSGD(4),
    "ternary": Ternary(),
    "natural": Natural(),
    "random-k": RandomK(0.3),
    "random-k-single": RandomK(0.3, seed=2, run_length=1),
    "perm-k": PermK(run_length=1),
}
# State of their own, or a residual.
REMEMBERING = {
    "power-sgd": PowerSGD(1, min_ratio=0),
    "dgc": DGC(0.25),
    "dgc-warm-up": DGC(0.25, nesterov=True, masking=False, warm_up=8),
    "switch-done": Switch({0: Cast(), 3: ErrorFeedback(TopK(0.25))}),
    "switch-coming": Switch({0: ErrorFeedback(Int8()), 6: ErrorFeedback(TopK(0.25))}),
    "owing-cast": ErrorFeedback(Cast()),
    "owing-int8": ErrorFeedback(Int8()),
    "owing-int4": ErrorFeedback(Int4(block_size=128)),
    "owing-fp8": ErrorFeedback(Fp8()),
    "owing-qsgd": ErrorFeedback(QSGD()),
    "owing-sign": ErrorFeedback(Sign(block_size=256)),
    "owing-ternary": ErrorFeedback(Ternary()),
    "owing-natural": ErrorFeedback(Natural()),
    "owing-top-k": ErrorFeedback(TopK(0.25)),
    "owing-threshold": ErrorFeedback(Threshold(0.5)),
    "owing-random-k": ErrorFeedback(RandomK(0.3)),
    "owing-perm-k": ErrorFeedback(PermK(run_length=1)),
    "owing-power-sgd": ErrorFeedback(PowerSGD(1, min_ratio=0)),
    "owing-chain": ErrorFeedback(Chain(TopK(0.25), Int8())),
    "owing-chain-drawing": ErrorFeedback(Chain(RandomK(0.3), Int8(seed=1))),
    "owing-per-parameter": ErrorFeedback(PerParameter({"*.scale": Cast(), "*": TopK(0.25)})),
    "per-parameter-owing": PerParameter(
        {"first.*": PowerSGD(1, min_ratio=0), "*": ErrorFeedback(TopK(0.25))}
    ),
}
LEARNED = Learned(0.5, dense_steps=1, learning_steps=5, innovation=0.1, auto_encoder=SMALL_CODES)

JOBS = {
    **{f"ddp-{name}": _ddp(each, remembers=False) for name, each in FORGETFUL.items()},
    **{f"ddp-{name}": _ddp(each) for name, each in {**DRAWING, **REMEMBERING}.items()},
    "ddp-dgc-clipped": _ddp(DGC(0.25, clip_norm=0.25), exact=False),
    "ddp-learned": _ddp(LEARNED, exact=False),
    "ddp-owing-learned": _ddp(ErrorFeedback(LEARNED), exact=False),
    "fsdp-cast": _fsdp(Cast(), Cast(), remembers=False),
    "fsdp-int8": _fsdp(ErrorFeedback(Int8()), Int8()),
    "fsdp-seeded": _fsdp(Int8(seed=1), Int8(seed=2)),
    "fsdp-top-k": _fsdp(ErrorFeedback(TopK(0.25))),
    "fsdp-dgc": _fsdp(DGC(0.25)),
    "fsdp-switch": _fsdp(Switch({0: Cast(), 3: ErrorFeedback(TopK(0.25))})),
    "fsdp-parameters": _fsdp(None, Int8(seed=2)),
    "fsdp-one-by-one": _one_by_one(ErrorFeedback(TopK(0.25)), Int8(seed=2)),
}

# The same, saved with checksums.
OF_FORMAT_2 = ["ddp-owing-top-k", "ddp-random-k", "fsdp-int8"]
JOBS |= {f"format-2-{name}": JOBS[name] for name in OF_FORMAT_2}
