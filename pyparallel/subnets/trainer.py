"""``SubnetTrainer``: every rank trains a smaller network; together they are the full model."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Call, Collectives, Run, warn_if_alone
from ..comm.errors import concise
from ..optim.finite_steps import FiniteSteps
from ..training import load_copy, seal, uncompiled
from ..training.full_state import full_state
from ..training.nonfinite import NonFinitePolicy, find_policy_error
from ..training.step_hook import StepHook
from ..training.trainer import Trainer, raising_on_all_ranks
from .optimizer_state import CarryState, OptimizerState
from .partition.partition import Partition
from .partition.tensor_cut import find_cuts
from .placement import Placement, Sharded
from .same_call import check_same_call
from .scale import Scale, Unscaled
from .shards import ModelShards
from .subnet import allocate, build_subnet, release, tensors_of
from .subnet_parts import SubnetParts
from .validation import check_state, examine, find_optimizer_error

OptimizerFn = Callable[[list[nn.Parameter]], Optimizer]


class SubnetTrainer(Trainer):
    """Independent subnetwork training: each rank trains its own units of every hidden dimension.

    Yuan, Wolfe, Dun, Tang, Kyrillidis, Jermaine (PVLDB 15(8) 2022, arXiv 1910.02120). The hidden
    units of a model are assigned to the ranks at random; each rank trains the smaller network of
    its units independently, with its own optimizer. Every ``interval`` steps all subnets are merged
    into the full model and units are assigned again. Between two hidden dimensions a subnet has
    1/n^2 of the weights, and only these are sent. The training loop stays the user's: forwards of
    ``trainer(inputs)``, steps of ``trainer.optimizer``, then ``trainer.flush()``.

    Inputs and outputs are not cut. Parameters that are not cut (the output's bias, embeddings) are
    averaged over all ranks at a merge. BatchNorm's running statistics move with their units;
    ``recalibrate`` measures them for the full model. Buffers that are not floating-point stay local
    to the rank. A rank that has run out of batches waits in ``flush()`` and takes part in the
    merges of the others, its units unchanged. Steps that a ``GradScaler`` skips are not counted.

    At construction rank 0's parameters and buffers are broadcast, and the module's parameters are
    freed: they read as nan outside of ``full_model()``. The module must already be on its device
    and of its dtype. A single rank works too, without a process group.

    Args:
        module: the full model, with floating-point parameters on one device.
        optimizer_fn: builds an optimizer over the list of the subnet's trainable parameters.
        interval: optimizer steps between two merges, at least 1.
        process_group: the ranks that train together; None means the default group.
        placement: which ranks store the full model: ``Sharded()`` (default) or ``Central()``.
        optimizer_state: what happens to it at a merge: ``CarryState()`` (default) or
            ``ResetState()``.
        scale: scaling of subnets: ``Unscaled()`` (default), ``Averaged()`` or ``Scaled()``.
        nonfinite: "raise": ``step()``, ``flush()`` and ``full_model()`` raise a NonFiniteError on
            all ranks, before anything is merged, where a subnet's parameters, its optimizer's state
            or a buffer would bring a nan into the full model, or an inf, which buffers may have. It
            names the first such rank and tensor. "skip": also, a step whose
            gradients have a nan or an inf changes nothing on its rank, but counts; on a GPU the
            host waits for each step. Both cost a pass over what they read. "allow": nothing.

    An argument that is invalid on a rank, or differs, is the same DisagreementError (a ValueError)
    on all, one of a wrong type an ArgumentTypeError. ``subnet`` is this rank's module, and
    ``optimizer`` that of its trainable parameters.
    """

    _copy_instead = "save its state_dict(), or copy the model inside full_model()"

    @concise
    def __init__(
        self,
        module: nn.Module,
        optimizer_fn: OptimizerFn,
        partition: Partition,
        interval: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        placement: Placement | None = None,
        optimizer_state: OptimizerState | None = None,
        scale: Scale | None = None,
        nonfinite: NonFinitePolicy = "raise",
    ) -> None:
        warn_if_alone()
        placement = Sharded() if placement is None else placement
        scale = Unscaled() if scale is None else scale
        optimizer_state = CarryState() if optimizer_state is None else optimizer_state
        module = uncompiled(module) if isinstance(module, nn.Module) else module
        run = Run(process_group)
        policies: dict[str, Any] = {
            "partition": partition, "interval": interval, "placement": placement,
            "optimizer_state": optimizer_state, "scale": scale,
        }  # fmt: skip
        self._config_fields, problem = examine(module, optimizer_fn, policies, run)
        policy = ("nonfinite", str(nonfinite))  # not saved: a run may go on with another one
        run.agree([*self._config_fields, policy], problem or find_policy_error(nonfinite))
        run = self._open_run(process_group)
        self._collectives = collectives = Collectives(run, run.stats)
        self._module, self._interval = module, interval
        self._finds_nonfinite = nonfinite != "allow"
        self._cut_dims = partition.cut_dims(module)
        with collectives.uncounted():
            for tensor in [*module.parameters(), *module.buffers()]:
                collectives.broadcast_(tensor.data, 0)
        tensors = tensors_of(module)
        self._cuts = find_cuts(self._cut_dims, tensors)
        with raising_on_all_ranks(run.agree, "module must support copying: "):
            place = partition.subnet_of(collectives.rank, collectives.size)
            self.subnet = build_subnet(module, self._cut_dims, self._cuts, *place)
            scale.apply(self.subnet, self._cut_dims, *place)
        enlarged = (name for cut_dim in self._cut_dims for name in cut_dim.consumer_weights)
        enlargement = dict.fromkeys(enlarged, scale.enlargement(place[1]))
        self._shards = ModelShards(self._cuts, tensors, placement, collectives, enlargement)
        self._round, self._steps = 0, 0
        self._waiting_seconds = 0.0  # in the last step
        self._is_gathered = False
        self._parts = SubnetParts(
            self.subnet, partition, self._cut_dims, self._cuts, self._shards, placement,
            optimizer_state, collectives,
        )  # fmt: skip
        self.optimizer = self._make_optimizer(optimizer_fn)
        self._first_state = copy.deepcopy(self.optimizer.state_dict()["state"])
        # "raise" checks what is merged, and no gradients.
        gradients: NonFinitePolicy = "skip" if nonfinite == "skip" else "allow"
        device = next((each.device for each in self.subnet.parameters()), torch.device("cpu"))
        self._finite_steps = FiniteSteps(
            [self.optimizer], gradients, run.counts, device, takes_scales=False
        )
        self._step_hook = StepHook(
            self.optimizer,
            self._after_step,
            before_update=self._finite_steps.begin,
            before_evaluation=self._finite_steps.end,
        )
        # Last: after an error above, the module still has its parameters.
        release(module.parameters())

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run this rank's subnet."""
        self._check_open()
        is_eager = not torch.compiler.is_compiling()
        trains = self.subnet.training and torch.is_grad_enabled()
        self._step_hook.see_forward(watches=is_eager and trains)
        return self.subnet(*inputs, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the subnet and the full model to training mode, as ``nn.Module.train`` does."""
        self.subnet.train(mode)
        self._module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the subnet and the full model to evaluation mode, as ``nn.Module.eval`` does."""
        return self.train(False)

    @property
    def round_index(self) -> int:
        """Number of merges so far, each followed by a new assignment of units."""
        return self._round

    @property
    def units(self) -> dict[str, Tensor]:
        """This rank's units by the name of the cut dimension: int64, ascending."""
        return {name: pieces[self._collectives.rank] for name, pieces in self._parts.units.items()}

    @property
    def payload_bytes(self) -> int:
        """Bytes of all subnets' cut tensors: sent by one scatter or merge, without optimizer state.

        Includes the parts that stay on their rank, excludes shared tensors: for an MLP with one
        hidden dimension n ranks exchange F x H weights, H biases and H x C weights.
        """
        return self._parts.payload_bytes

    def metrics(self) -> dict[str, float]:
        """Return what this rank has measured, under names for TensorBoard, W&B or ``log_dict``.

        Nothing is exchanged, and the host waits for no GPU.

        * ``rank/bytes_sent`` for training, so far;
        * ``rank/waiting_seconds``: for which the host has waited for other ranks in the last step:
          0 unless it has merged. On NCCL streams wait instead;
        * ``rank/staleness``: steps since the last merge, so 0 after a step that has merged;
        * ``rank/merges`` so far, and in what was loaded;
        * ``rank/steps`` that were completed since the trainer was created, and of these the
          ``rank/skipped_steps``, whose gradients ``nonfinite="skip"`` has left out.
        """
        return {
            "rank/bytes_sent": float(self.bytes_sent),
            "rank/waiting_seconds": self._waiting_seconds,
            "rank/staleness": float(self._steps),
            "rank/merges": float(self._round),
            "rank/steps": float(self._run.counts.steps),
            "rank/skipped_steps": float(self._finite_steps.num_skipped),
        }

    # In inference mode, optimizer state would be created that later steps could not write.
    @concise
    @torch.inference_mode(mode=False)
    def flush(self) -> None:
        """Merge the steps since the last merge and assign units again; all ranks call it.

        Returns when all ranks have called it. Does nothing if no rank has taken a step since.
        """
        self._check_open()
        self._run.check_usable()
        is_last = False
        while not is_last:
            calls = self._check_same_call(Call.FLUSH)
            is_last = all(call == Call.FLUSH for call, _ in calls)
            if any(steps for _, steps in calls):
                self._begin_round()

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """Hold the full model in the module inside the context; all ranks enter it together.

        It includes the steps since the last merge; training continues afterwards as if it had not
        been entered. Changes made inside are lost: save or copy what should stay.

        A RuntimeError if it is already entered.
        """
        self._check_open()
        if self._is_gathered:
            raise RuntimeError("full_model() must not be entered inside itself")
        self._check_same_call(Call.FULL_MODEL)
        parameters = list(self._module.parameters())
        self._is_gathered = True
        try:
            allocate(parameters)
            with self._collectives.uncounted():
                self._parts.gather_into(self._module)
            yield self._module
        finally:
            release(parameters)
            self._is_gathered = False

    @concise
    def full_state_dict(self) -> dict[str, Any]:
        """Return the full model's state, as the plain module has it; all ranks call it together.

        On rank 0 copies in the CPU's memory, with the steps since the last merge; {} elsewhere.
        """
        with self.full_model() as module:
            return full_state(module, self._run)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of a checkpoint; every rank saves its own, between two steps.

        It is a copy in the memory of the CPU. Schedulers, random generators and the position in the
        data are left to the user.
        """
        self._check_open()
        return seal(self._collect_state())

    def _collect_state(self) -> dict[str, Any]:
        return {
            "config": self._config_fields,
            "rank": self._collectives.rank,
            "num_ranks": self._collectives.size,
            "round": self._round,
            "steps": self._steps,
            "shards": self._shards.state_dict(),
            "subnet": self.subnet.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    @concise
    @torch.inference_mode(mode=False)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume bit for bit from ``state_dict``; all ranks call it together.

        A state that is damaged, or of another rank, number of ranks, partition, module or
        optimizer, and states of different rounds, are a DisagreementError on all ranks, which have
        changed nothing.
        """
        own = self._collect_state()
        check_state(state_dict, own, self._shards, self.optimizer, self._run)
        self._run.mend()
        self._round, self._steps = state_dict["round"], state_dict["steps"]
        self._parts.draw(self._round)
        self._shards.load_state_dict(state_dict["shards"])
        self.subnet.load_state_dict(state_dict["subnet"])
        load_copy(self.optimizer, state_dict["optimizer"])
        self._step_hook.reset()

    def close(self) -> None:
        """Stop merging: the optimizer's steps train only this rank's subnet from now on."""
        self._step_hook.close()
        self._finite_steps.close()
        super().close()

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> Optimizer:
        parameters = [p for p in self.subnet.parameters() if p.requires_grad]
        with raising_on_all_ranks(self._run.agree, "optimizer_fn: "):
            built = optimizer_fn(parameters)
        with raising_on_all_ranks(self._run.agree) as fields:
            if error_text := find_optimizer_error(built, parameters):
                raise ValueError(error_text)
            self._shards.init_states(self._parts.carried_state(built))
            self._config_fields.append(("optimizer", type(built).__qualname__))
            fields.extend(self._config_fields)
        self._own([built])
        return built

    def _after_step(self) -> None:
        self._finite_steps.end()
        self._steps += 1
        self._run.counts.count_step()
        before = self._collectives.stats.waiting_seconds
        if self._steps >= self._interval:  # above it after a failed merge, which is tried again
            self._run.check_usable()
            self._check_same_call(Call.STEP)
            self._begin_round()
        self._waiting_seconds = self._collectives.stats.waiting_seconds - before

    def _begin_round(self) -> None:
        with self._run.interruptible():
            self._parts.merge(self.optimizer, self._first_state, self._round + 1)
            self._round += 1
            self._steps = 0

    def _check_same_call(self, call: Call) -> list[tuple[int, int]]:
        return check_same_call(
            call, self._round, self._steps, self._parts, self.optimizer, self._finds_nonfinite
        )
