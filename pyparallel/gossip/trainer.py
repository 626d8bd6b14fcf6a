"""``GossipDataParallel``: the trainer that runs a gossip algorithm in the user's training loop."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from ..comm import Collectives, StepCounts
from ..comm.errors import concise
from ..optim import FusedOptimizer
from ..optim.finite_steps import FiniteSteps
from ..training import Algorithm, ModelAverager, Place, check_format, consensus, seal, shards
from ..training.arguments import find_error, raise_problem
from ..training.averager import JoinedOptimizers, as_optimizers
from ..training.full_state import full_state
from ..training.nonfinite import NonFinitePolicy, find_policy_error
from ..training.step_hook import StepHook, StepHooks
from ..training.trainer import Trainer
from . import validation
from .algorithms.base import TRANSPORT, find_algorithm_error
from .membership import Membership
from .membership.averager import ElasticAverager
from .membership.elastic import Elastic, make_elastic
from .module_wrapper import ModuleWrapper
from .rounds import SteppedRounds


class GossipDataParallel(Trainer, ModuleWrapper):
    """A module trained on all ranks of a process group with a gossip algorithm.

    The training loop stays the user's: ``zero_grad``, forward, backward, ``optimizer.step()``.
    Communication happens in ``optimizer.step()`` and is complete when it returns, unless the
    algorithm overlaps it with the next steps. At construction the ranks check that their arguments
    are consistent, and rank 0 broadcasts its parameters and buffers.

    The module is trained in place: its parameters become views of flat buffers, so it must be on
    its device and of its dtype before it is wrapped. Keys, names and attributes are the module's
    own, without those of ``torch.compile``; call the trainer, not the module, to train. Buffers
    such as BatchNorm statistics stay local.

    Args:
        module: trainable parameters in float32, float64, bfloat16 or float16, on one device.
        optimizer: any torch optimizer over the module's trainable parameters; frozen ones may be
            among them, as in DistributedDataParallel: they are neither sent nor changed. One of
            ``pyparallel.optim`` steps, averages and writes messages in one pass over its buckets.
            Or a list of several, such as ``[Muon(...), AdamW(...)]``, each parameter in one: a
            training step is then one step of each, in any order and without closures. Its round
            begins before the first one's update and ends after the last one's.
        algorithm: for example ``SGP(overlap=1)``, ``SGP(Ring)`` or ``AllReduce()``; with
            ``membership`` SGP, DPSGD or NoLoCo, whose topology is a class or left out, or other
            outer steps of whole models without a delay, such as ``DiLoCo(100)``.
        process_group: the ranks that train together; None means the default group.
        mesh: instead, of a module that ``fully_shard`` has sharded over another dimension of the
            same mesh: the dimension of its replicas, such as ``mesh["replicate"]``. A rank
            exchanges its shard with the ranks that hold the same one of other replicas; push-sum
            weight, round and what is done about a step are of a replica as a whole.
        bucket_cap_mb: approximate size of a bucket, and so of a message, in MiB. None: 25 on the
            CPU, on GPUs 256, or 64 with ``overlap=0``, where the step of a bucket hides the message
            of another; a model of one dtype below it is one message to each neighbor.
        nonfinite: what a step does if its gradients hold an inf or a nan, unless a GradScaler
            decides. "skip" does not update this rank's parameters but takes the round, so that the
            mass is conserved; "raise" does so too, and raises a NonFiniteError on this rank and on
            the ranks that receive its message. "allow" checks nothing.
        membership: an object such as ``Lighthouse()``: who trains together, while processes come
            and go and the others train on. It makes the process groups, on CPUs with gloo, in
            place of ``init_process_group``. None: the ranks of the group, all of which must stay.

    Raises:
        DisagreementError: (a ValueError) an argument of one rank is invalid, or arguments differ
            between ranks; all ranks raise the same message.
        ArgumentTypeError: (a DisagreementError and a TypeError) one is of a wrong type.
    """

    _copy_instead = "copy its .module"
    _in_consensus = False

    @concise
    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        algorithm: Algorithm,
        *,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        bucket_cap_mb: float | None = None,
        nonfinite: NonFinitePolicy = "raise",
        membership: Membership | None = None,
    ) -> None:
        made: Any = algorithm
        if membership is not None:
            made = make_elastic(algorithm, membership, process_group or mesh, module)
        else:
            process_group = validation.resolve_group(process_group, mesh)
        if membership is None and process_group is None and not dist.is_initialized():
            raise ValueError(
                "process_group must be initialized, got none; call "
                "torch.distributed.init_process_group first"
            )
        super().__init__()
        is_sharded = isinstance(module, nn.Module) and mesh is not None
        replica = shards.replica_group(module) if is_sharded else None
        made, compared, error_text = _collect_config(
            module, optimizer, made, process_group, mesh, bucket_cap_mb, nonfinite
        )
        self.config_fields = [each for each in compared if each[0] != TRANSPORT]
        # Not saved: states have the classes themselves, and a run may go on with another policy.
        config_fields = [
            ("mesh", "none" if mesh is None else "one"),
            ("optimizers", _describe_optimizers(optimizer)),
            *compared,
            ("nonfinite", str(nonfinite)),
        ]
        if isinstance(made, Elastic):
            made = replace(made, config=config_fields)
            raise_problem(error_text)  # of a process that is no member yet
        else:
            validation.check_together(config_fields, error_text, process_group, mesh, replica)
        self._wrap(module)
        self.algorithm: Algorithm = made
        self.process_group = process_group
        self._sharded, self._kind = shards.sharded_modules(self.module), type(self.module)
        run = self._open_run(process_group, StepCounts(policy=nonfinite), replica)
        cap = validation.resolve_bucket_cap_mb(module, bucket_cap_mb, made)
        optimizers = as_optimizers(optimizer)
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._buckets = validation.lay_out(module, optimizers, int(cap * 2**20))
        shards.follow(self._sharded)
        fused = [each for each in optimizers if isinstance(each, FusedOptimizer)]
        # With others, or with what may write weights after it, the round is a pass of its own.
        in_pass = bool(fused) and len(optimizers) == 1 and fused[0].ends_with_pass
        self._broadcast_from_first_rank()
        # Held here, as algorithms hold weak references.
        joined = self._joined = JoinedOptimizers(optimizers) if len(optimizers) > 1 else None
        whole: Any = joined or optimizers[0]
        averager = made.start(module, whole, self._buckets, run)
        self._running: ModelAverager | None = averager
        self._own(optimizers)
        device = self._buckets.parameters[0].device
        finite_steps = FiniteSteps(optimizers, nonfinite, run.counts, device, replica=run.replica)
        self._rounds = rounds = SteppedRounds(averager, run, finite_steps, self.module, in_pass)
        for each in fused:
            each.adopt(rounds.step_buckets if in_pass else None)
        # The optimizers hold the hooks, which hold the trainer. A cycle would keep process groups
        # beyond destroy_process_group(), until Python collects garbage.
        calls = rounds.after_step, self._before_step, rounds.before_update, rounds.end_update
        step_hook: StepHook | StepHooks
        if joined is None:
            step_hook = StepHook(optimizers[0], *calls, after_update=rounds.end_update)
        else:
            step_hook = StepHooks(optimizers, *calls)
        self._step_hook = weakref.ref(step_hook)
        # Also called when the trainer is garbage collected, and at exit.
        self._close_averager = weakref.finalize(self, rounds.close)

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        averager = self._averager
        is_eager = not torch.compiler.is_compiling()  # it would compile again for every count
        trains = self.training and torch.is_grad_enabled()
        if step_hook := self._step_hook():
            step_hook.see_forward(watches=is_eager and trains and self._run.counts.synchronizes)
        elif is_eager and trains:
            raise RuntimeError(
                "a trainer's optimizer must be kept and stepped, got a forward in training after "
                "it was deleted; close() the trainer and wrap again with the optimizer that steps"
            )
        if is_eager:
            self._rounds.check_replica()
        if trains:
            self._rounds.see_forward(counts=is_eager)
            if is_eager and self._buckets.first_has_moved:  # else the forward may fail on dtypes
                self._buckets.check([])
            if is_eager and not self._sharded and type(self.module) is not self._kind:
                self._check_module()  # fully_shard has given it a class of its own
        averager.restore_debiased()
        if averager.traits.has_equal_batches:
            self._rounds.joined.before_forward()
        return averager.wrap(self._called)(*inputs, **kwargs)

    @property
    def push_sum_weight(self) -> Tensor:
        """Push-sum weight of this rank, 0-d float64; 1 for algorithms without PushSum."""
        return self._averager.status.weight

    @property
    def loads_other_buckets(self) -> bool:
        """Whether a state loads that was saved with the optimizer's parameters in other groups."""
        return self._averager.traits.loads_other_buckets

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members, by rank; a RuntimeError without ``membership``."""
        return self._elastic.members

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 1; a RuntimeError without ``membership``."""
        return self._elastic.epoch

    def leave(self) -> None:
        """Send this rank's share of the model to its receivers, and close.

        With outer steps nothing is sent: what was learned since the last one is lost. The others
        must still step, and go on; the last member just closes. The module stays as it is. A
        RuntimeError without ``membership``.
        """
        self._elastic.leave()
        self.close()

    def metrics(self, *, consensus_distance: bool = False) -> dict[str, float]:
        """Return what this rank has measured, under names for TensorBoard, W&B or ``log_dict``.

        Nothing is exchanged, unless ``consensus_distance``. On a GPU the host waits for the weight.

        * ``rank/bytes_sent``: for training, so far, excluding ``consensus`` and checks;
        * ``rank/bits_per_parameter``: of these, for each completed step and parameter that the rank
          holds, of sharded ones its shard;
        * ``rank/waiting_seconds``: for which the host has waited for other ranks in the last step:
          from the end of the step before, so in backward too. On NCCL streams wait instead;
        * ``rank/hidden_seconds``: for which a thread has waited so far, beside the training, for
          outer steps with a delay;
        * ``rank/staleness``: how many steps old the messages merged last were, 0 without overlap;
        * ``rank/push_sum_weight``: 1 for algorithms without PushSum;
        * ``rank/steps`` that were completed since the trainer was created, and of these the
          ``rank/skipped_steps``, whose update an inf or a nan in the gradients has prevented; but
          those that only a GPU knows.

        With ``consensus_distance=True`` it is among them, and all ranks must call this together.
        """
        status, num_steps = self._averager.status, self._rounds.num_steps
        num_parameters = sum(each.numel() for each in self._buckets.tensors)
        found: dict[str, float | Tensor] = {
            "rank/bytes_sent": self.bytes_sent,
            "rank/bits_per_parameter": 8 * self.bytes_sent / (num_parameters * max(1, num_steps)),
            "rank/waiting_seconds": self._rounds.waiting_seconds,
            "rank/hidden_seconds": status.hidden_seconds,
            "rank/staleness": status.staleness,
            "rank/push_sum_weight": status.weight,
            "rank/steps": num_steps,
            "rank/skipped_steps": self._rounds.finite_steps.num_skipped,
        }
        if consensus_distance:
            found["consensus_distance"] = self.consensus_distance()
        return {name: float(value) for name, value in found.items()}

    def record_loss(self, loss: Tensor | float) -> None:
        """Record the loss of a batch before ``optimizer.step()``; no host synchronization.

        ``LeaderSGD`` needs it, a number or a tensor of one element, in every step; all other
        algorithms accept and ignore it.
        """
        for read in self._run.read_loss:
            read(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which steps do not communicate.

        As in DistributedDataParallel, for accumulating gradients over several backward passes, or
        for several local steps. All ranks must do the same.
        """
        return self._run.counts.no_sync()

    def join(
        self, *, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context for unequal numbers of batches: ranks without batches still communicate.

        Of one trainer at a time: two in a loop need equal numbers of batches.
        ``throw_on_early_termination`` raises on all ranks once one has no batches left. Inside the
        ``join()`` of another trainer it is a RuntimeError: ranks would wait in one for each other's
        rounds of the other.
        """
        self._check_open()
        return self._rounds.joined.join(
            enable=enable, throw_on_early_termination=throw_on_early_termination
        )

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Load the exact average of all ranks into the module inside the context; restore it after.

        Parameters are averaged with the push-sum weights, including messages in flight; of DiLoCo
        and NoLoCo they are those after the last outer step, and of EASGD the center, as in the
        papers' evaluations; floating-point buffers (such as BatchNorm statistics) without weights.
        Frozen parameters are equal on all ranks and stay as they are. All ranks must enter it
        together; one inside another changes nothing, and one rank may enter it alone.
        """
        if self._in_consensus:
            yield self.module
            return
        self._check_mergeable()
        merged, weight = self._averager.as_evaluated()
        buffers = [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]
        collectives = Collectives(self._run)
        averages = consensus.average(merged, weight, collectives)
        averages += consensus.average(buffers, torch.ones_like(weight), collectives)
        del merged
        with consensus.assigned([*self._buckets.buffers, *buffers], averages):
            self._in_consensus = True
            try:
                yield self.module
            finally:
                self._in_consensus = False
                shards.reshard(self._sharded)

    @concise
    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of ``consensus()``, as the plain module has it; all ranks call it.

        On rank 0 copies in the CPU's memory, of shards the whole; {} elsewhere.
        """
        with self.consensus() as module:
            return full_state(module, self._run)

    @concise
    def consensus_distance(self) -> float:
        """Return the root mean square over ranks of ``||z_i - average||_2``.

        z_i are what a forward reads: messages in flight are in the average alone. The same number
        on all ranks, which must call it together.
        """
        self._check_mergeable()
        collectives = Collectives(self._run)
        averages = consensus.average(*self._averager.as_merged(), collectives)
        return consensus.distance(self._buckets.buffers, averages, collectives)

    @concise
    def flush(self) -> None:
        """Complete all communication in flight, after the last step, on all ranks together."""
        self._averager.restore_debiased()
        self._check_equal_steps()
        self._averager.flush()

    # Torch declares two overloads; this signature covers both.
    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's own state dict, which the bare module can load, and vice versa.

        Its tensors are the live ones, each in a storage of its own.
        """
        if self._running is not None:
            self._running.restore_debiased()
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    @override
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the module, on all ranks together, and reset the algorithm.

        Messages in flight are merged before, and anchors, slow momentum and leaders are reset.
        ``assign=True`` is an error, as it would replace the parameters.
        """
        if not assign:
            self.flush()
        result = super().load_state_dict(state_dict, strict, assign)
        self._averager.reset()
        self._begin_new_step()
        return result

    @concise
    def algorithm_state_dict(self) -> dict[str, Any]:
        """Return a copy of the algorithm's state beyond the module; all ranks call it together.

        ``GossipState`` saves it together with everything else that a run needs to resume.
        """
        return seal(self._collect_state())

    @concise
    def load_algorithm_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what ``algorithm_state_dict`` returned; all ranks must call it together.

        States that are damaged, of another format, or of different rounds or steps are a
        DisagreementError on all ranks, which have changed nothing.
        """
        averager = self._averager

        def read() -> tuple[dict[str, Any], list[tuple[str, str]]]:
            check_format(state_dict)
            return validation.averagers_part(state_dict), []

        validation.check_states_together(averager, read, self._run)
        averager.restore_debiased()
        averager.load_state_dict(validation.averagers_part(state_dict))
        self._run.counts.reset()
        self._run.mend()
        self._begin_new_step()

    @override
    def close(self) -> None:
        """Stop all communication: the optimizer then trains the module on this rank alone.

        Called automatically when the trainer is garbage collected and at exit, so that the process
        group and its threads end while Python still runs.
        """
        if step_hook := self._step_hook():
            step_hook.close()
        if self._running is not None:
            self._rounds.finite_steps.close()
            for reference in self._optimizers:
                if isinstance(optimizer := reference(), FusedOptimizer):
                    optimizer.release()
            self._close_averager()
            del self._rounds
            self._running = None
        super().close()
        self.process_group = None

    @override
    def extra_repr(self) -> str:
        return f"algorithm={self.algorithm!r}"

    @property
    def _elastic(self) -> ElasticAverager:
        averager = self._averager
        if not isinstance(averager, ElasticAverager):
            raise RuntimeError("members can be seen, and leave, only with membership, got none")
        return averager

    @property
    def _averager(self) -> ModelAverager:
        self._check_open()
        assert self._running is not None
        return self._running

    @torch.no_grad()
    def _broadcast_from_first_rank(self) -> None:
        trainable = {id(parameter) for parameter in self._buckets.parameters}
        frozen = [p for p in self.module.parameters() if id(p) not in trainable]
        collectives = Collectives(self._run)
        held = map(shards.local_of, frozen)
        for tensor in [*self._buckets.buffers, *held, *self.module.buffers()]:
            collectives.broadcast_(tensor, 0)

    def _before_step(self, optimizer: Optimizer, has_gradients: bool) -> None:
        """Receive and merge, unless a fused optimizer does so in its pass."""
        self._run.check_usable()
        shards.reshard(self._sharded)
        groups = [g for each in self._optimizers if (o := each()) for g in o.param_groups]
        self._buckets.check(chain.from_iterable(group["params"] for group in groups))
        self._check_module()
        self._averager.restore_debiased()
        self._rounds.before_step(optimizer, has_gradients)

    def _collect_state(self) -> dict[str, Any]:
        self._averager.restore_debiased()
        self._check_between_steps()
        self._check_equal_steps()
        return self._averager.state_dict()

    def _begin_new_step(self) -> None:
        if step_hook := self._step_hook():
            step_hook.reset()

    def _check_between_steps(self) -> None:
        """Raise on all ranks if some of several optimizers have stepped and others have not."""
        if isinstance(step_hook := self._step_hook(), StepHooks):
            found = step_hook.find_unfinished()
            text = (
                found and f"states must be saved between two training steps, got one after {found}"
            )
            self._run.agree([], text)

    def _check_equal_steps(self) -> None:
        if self._averager.traits.has_equal_steps:
            self._rounds.joined.before_call()
            self._run.check_equal_steps(self._buckets.parameters[0].device)

    def _check_mergeable(self) -> None:
        self._check_open()
        self._rounds.check_replica()
        self._averager.restore_debiased()
        shards.reshard(self._sharded)
        self._buckets.check(())
        self._check_equal_steps()


def _collect_config(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    algorithm: Algorithm,
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    bucket_cap_mb: float | None,
    nonfinite: object,
) -> tuple[Algorithm, list[tuple[str, str]], str | TypeError | None]:
    """Return the bound algorithm, what ranks must share, this rank's error; never raises."""
    try:
        type_error = find_error(lambda: validation.check_types(module, optimizer, bucket_cap_mb))
        if type_error := type_error or find_algorithm_error(algorithm):
            return algorithm, [], type_error
        num_ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
        try:
            algorithm = algorithm.bind(num_ranks)
        except ValueError as error:
            return algorithm, [], str(error)
        cap = validation.resolve_bucket_cap_mb(module, bucket_cap_mb, algorithm)
        optimizers = as_optimizers(optimizer)
        config_fields = [
            *algorithm.config_fields(),
            ("bucket_cap_mb", str(cap)),
            *shards.describe_shard(module),
            *validation.describe(module),
            *validation.describe_groups(module, optimizers),
        ]
        dtypes = frozenset(p.dtype for p in module.parameters() if p.requires_grad)
        error_text = (
            shards.find_shard_error(module, mesh)
            or validation.find_validation_error(module, optimizers, process_group)
            or algorithm.error_at(Place(num_ranks, dtypes=dtypes, is_sharded=mesh is not None))
        )
        if not 0 < cap < float("inf"):
            error_text = f"bucket_cap_mb must be positive and finite, got {cap}"
        error_text = find_policy_error(nonfinite) or error_text
    except Exception as error:
        return algorithm, [], f"{type(error).__name__}: {error}"
    return algorithm, config_fields, error_text


def _describe_optimizers(optimizer: object) -> str:
    """Return the classes of several optimizers; one may be of another class on every rank."""
    several = as_optimizers(optimizer)
    return "one" if len(several) == 1 else ", ".join(type(each).__name__ for each in several)
