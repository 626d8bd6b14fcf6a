"""``GossipDataParallel``: gossip hooked into the user's own training loop."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer

from ..comm import FlatBuckets, check_consistent_across_ranks
from . import consensus
from .algorithms.base import Algorithm, Session, TakesLosses
from .amp import ScaledSteps
from .validation import describe, find_validation_error


class GossipDataParallel(nn.Module):
    """Train a module on every rank of a process group, kept together by a gossip algorithm.

    The loop stays the user's: ``zero_grad``, forward, backward, ``optimizer.step()``. The round of
    averaging belongs to ``optimizer.step()`` and is complete when it returns, unless the algorithm
    lets it travel during the next steps. At construction the ranks check that they fit each other,
    and rank 0's parameters and buffers go to all.

    The module is trained in place: its parameters become views of flat buffers, so it must be on
    its device and of its dtype before it is wrapped. ``state_dict()`` and ``named_parameters()``
    have the module's own keys. Buffers such as BatchNorm statistics stay local.

    Args:
        module: trainable parameters in float32, bfloat16 or float16, on one device.
        optimizer: any torch optimizer over exactly the module's trainable parameters.
        algorithm: for example ``SGP(OnePeerExponential(num_ranks))`` or ``AllReduce()``.
        process_group: the ranks that train together; None means the default group.
        bucket_cap_mb: about how many MiB of parameters travel in one message.

    Raises:
        DisagreementError: (a ValueError) what one rank found wrong, or where ranks differ; all
            ranks raise the same sentence.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        algorithm: Algorithm,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        super().__init__()
        self.config_fields, problem = _examine(
            module, optimizer, algorithm, process_group, bucket_cap_mb
        )
        check_consistent_across_ranks(self.config_fields, problem, process_group)
        parameters = [p for p in module.parameters() if p.requires_grad]
        self.module = module
        self.algorithm = algorithm
        self.process_group = process_group
        self._buckets = FlatBuckets(parameters, int(bucket_cap_mb * 2**20))
        self._broadcast_from_first_rank()
        session = algorithm.start(module, optimizer, self._buckets, process_group)
        self._running: Session | None = session
        self._step_depth = 0
        self._has_closure = False
        self._scaled_steps = ScaledSteps(optimizer)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        # Also runs when the trainer is dropped, and at exit.
        self._end_session = weakref.finalize(self, session.close)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not self._has_closure:
            self._step_depth = 0  # a step that raised has not counted down
        return self._session.forward(*inputs, **kwargs)

    @property
    def weight(self) -> Tensor:
        """0-d float64: this rank's PushSum mass; it is 1 wherever averaging is plain."""
        return self._session.weight

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent for training, ``consensus`` and checks not counted."""
        return self._session.bytes_sent

    def record_loss(self, loss: Tensor | float) -> None:
        """Tell the loss of a batch, before ``optimizer.step()``; it does not wait for the device.

        ``LeaderSGD`` chooses by it and must be told in every step. All algorithms accept it, so
        that one loop serves them all; the others have no use for it.

        Args:
            loss: a number, or a tensor of one element.
        """
        session = self._session
        if isinstance(session, TakesLosses):
            session.record_loss(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Postpone communication: gossip takes no round for steps inside the context.

        As in DistributedDataParallel, for accumulating gradients over several backward passes, or
        several steps. All ranks must do the same.
        """
        return self._session.no_sync()

    def join(
        self, *, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[Any]:
        """Let ranks have unequal numbers of batches: who is done keeps answering its neighbors.

        Args:
            enable: False makes the context do nothing.
            throw_on_early_termination: raise on all ranks when the first one is done.
        """
        return _join(self._session.joinable, enable, throw_on_early_termination)

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Hold the exact average of all ranks in the module inside the context; restore it after.

        Parameters are averaged with the ranks' masses as weights, messages under way included,
        floating-point buffers (such as BatchNorm statistics) plainly. All ranks must enter it
        together.
        """
        (merged, weight), buffers = self._merged_buckets(), self._float_buffers()
        averages = consensus.average(merged, weight, self.process_group)
        averages += consensus.average(buffers, torch.ones_like(weight), self.process_group)
        del merged
        tensors = [*self._buckets.buffers, *buffers]
        mine = [tensor.clone() for tensor in tensors]
        try:
            _assign(tensors, averages)
            yield self.module
        finally:
            _assign(tensors, mine)

    def consensus_distance(self) -> float:
        """How far apart the ranks are: the root mean square of ``||z_i - average||_2``.

        The same number on all ranks, which must call it together.
        """
        return consensus.distance(*self._merged_buckets(), self.process_group)

    def flush(self) -> None:
        """End the communication under way, as after the last step; all ranks must call it together.

        With an algorithm that overlaps its rounds, messages otherwise travel until the next step.
        """
        self._session.flush()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, without a prefix."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's own, without a prefix."""
        return self.module.named_buffers(*args, **kwargs)

    # Torch declares two overloads that say no more than this.
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own: it loads into the bare module, and a bare module's loads here."""
        if self._running is not None:
            self._running.settle()
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load into the module, by all ranks together; the algorithm begins anew from there.

        What travels is merged first, so that it cannot come later, and anchors, slow momentum and
        leaders are forgotten. ``assign=True`` is refused, as it would unhook the parameters.
        """
        if assign:
            raise ValueError("assign must be False: parameters are views of flat buffers, got True")
        self._session.flush()
        result = self.module.load_state_dict(state_dict, strict)
        self._session.restart()
        return result

    def algorithm_state_dict(self) -> dict[str, Any]:
        """What the algorithm remembers beyond the module; all ranks must call it together.

        ``GossipState`` saves it together with all else that a run needs.
        """
        return self._session.state_dict()

    def load_algorithm_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``algorithm_state_dict`` was taken; all ranks must call it together."""
        self._session.load_state_dict(state_dict)

    def close(self) -> None:
        """End the communication: the optimizer then trains the module on this rank alone.

        Happens by itself when the trainer is dropped and at exit, so that the process group and
        its threads can end while Python still runs.
        """
        for hook in self._hooks:
            hook.remove()
        if self._running is not None:
            self._scaled_steps.close()
        self._end_session()
        self._running = None
        self.process_group = None

    def extra_repr(self) -> str:
        """The algorithm, with the topology it holds."""
        return f"algorithm={self.algorithm!r}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise RuntimeError(
            "the module must be moved or converted before it is wrapped: its parameters are views "
            "of flat buffers; got .to(), .cuda(), .half() or the like afterwards"
        )

    @property
    def _session(self) -> Session:
        if self._running is None:
            raise RuntimeError("GossipDataParallel must not be used after close()")
        return self._running

    def _float_buffers(self) -> list[Tensor]:
        return [buffer for buffer in self.module.buffers() if buffer.is_floating_point()]

    @torch.no_grad()
    def _broadcast_from_first_rank(self) -> None:
        trainable = {id(parameter) for parameter in self._buckets.parameters}
        frozen = [p for p in self.module.parameters() if id(p) not in trainable]
        for tensor in [*self._buckets.buffers, *frozen, *self.module.buffers()]:
            dist.broadcast(tensor, group=self.process_group, group_src=0)

    # An optimizer whose step calls its parent's runs the hooks of both: only the outer ones count.
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The signature is step(closure=None), and torch passes the optimizer as args[0].
        has_closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        if has_closure and self._step_depth:
            self._step_depth = 0
            raise RuntimeError(
                "optimizer.step(closure) must not begin inside another step, and one must have "
                "ended before; got an interrupted or a nested one"
            )
        if self._step_depth == 0:
            self._buckets.check(p for group in optimizer.param_groups for p in group["params"])
            self._session.before_step(has_closure=has_closure)
            self._scaled_steps.begin()
        self._has_closure = has_closure
        self._step_depth += 1

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step_depth -= 1
        if self._step_depth == 0:
            self._has_closure = False
            self._scaled_steps.end()
            self._session.after_step()

    def _merged_buckets(self) -> tuple[list[Tensor], Tensor]:
        self._session.settle()
        self._buckets.check(())
        return self._session.as_merged()

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("GossipDataParallel must not be copied or pickled: copy its .module")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(None)


def _examine(
    module: nn.Module,
    optimizer: Optimizer,
    algorithm: Algorithm,
    process_group: dist.ProcessGroup | None,
    bucket_cap_mb: float,
) -> tuple[list[tuple[str, str]], str | None]:
    """The facts that ranks must share and what is wrong here; never raises, so all hear it."""
    try:
        config_fields = [
            *algorithm.config_fields(),
            ("bucket_cap_mb", str(bucket_cap_mb)),
            *describe(module),
        ]
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        problem = find_validation_error(parameters, optimizer, process_group)
        problem = problem or algorithm.validation_error(dist.get_world_size(process_group))
        if not 0 < bucket_cap_mb < float("inf"):
            problem = f"bucket_cap_mb must be positive and finite, got {bucket_cap_mb}"
    except Exception as error:  # agree() raises it on every rank
        return [], f"{type(error).__name__}: {error}"
    return config_fields, problem


@contextmanager
def _join(joinable: Joinable, enable: bool, throw_on_early_termination: bool) -> Iterator[None]:
    before = joinable._join_config
    try:
        with Join([joinable], enable, throw_on_early_termination):
            yield
    finally:
        joinable._join_config = before  # Join leaves its own, and every later step would notify


@torch.no_grad()
def _assign(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
