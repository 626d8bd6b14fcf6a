"""``SubnetTrainer``: every rank trains a smaller network, and all of them make up the whole."""

import copy
import enum
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import DisagreementError, first_difference
from ..comm.step_hook import StepHook
from .collectives import SubnetCollectives
from .exchange import ShardExchange, assign
from .optimizer_state import CarryState, OptimizerState
from .partition.partition import Partition
from .partition.tensor_cut import find_cuts
from .placement import Placement, Sharded
from .scale import Scale, Unscaled
from .shards import ModelShards
from .shared import average
from .storage import allocate, release
from .subnet import build_subnet, tensors_of
from .validation import (
    Facts,
    describe,
    describe_widths,
    find_problem_of_optimizer,
    find_validation_error,
)

OptimizerFn = Callable[[list[nn.Parameter]], Optimizer]


class SubnetTrainer:
    """Independent subnetwork training: each rank trains its own units of every hidden width.

    Yuan, Wolfe, Dun, Tang, Kyrillidis, Jermaine (PVLDB 15(8) 2022, arXiv 1910.02120). The hidden
    units of a model are dealt out among the ranks at random; a rank trains the smaller network they
    make, by itself, with an optimizer of its own; every ``interval`` steps all subnets are written
    back into the whole model, and units are dealt out anew. Between two hidden widths a subnet has
    1/n^2 of the weights, and that is all that is sent. The loop stays the user's::

        trainer = SubnetTrainer(model, lambda p: torch.optim.SGD(p, lr=0.1), Partition(), 20)
        for inputs, targets in batches:
            trainer.optimizer.zero_grad()
            loss_fn(trainer(inputs), targets).backward()
            trainer.optimizer.step()
        trainer.flush()
        with trainer.assembled() as module:
            evaluate(module)

    Inputs and outputs are whole. Each parameter is either cut or shared: shared ones (the output's
    bias, embeddings, norms of a width that is not cut) are all ranks' alike after a merge, the
    average of what each has made of them. BatchNorm's running statistics go with their units;
    ``recalibrate`` measures them for the whole model. Buffers that are not floating-point stay the
    rank's own. A rank that has run out of batches waits in ``flush()`` and takes part in the merges
    of the others, its units as they are; a step that a ``GradScaler`` leaves out is no step.

    At construction rank 0's parameters and buffers go to all, and the module's parameters lose
    their memory: they read as nan outside of ``full_model()``. The module must be on its device and
    of its dtype before. Works alone too, without a process group.

    Args:
        module: the whole model, with floating-point parameters on one device.
        optimizer_fn: from the list of a subnet's trainable parameters to an optimizer over them.
        partition: what is cut, and the seed.
        interval: optimizer steps between two merges, at least 1.
        process_group: the ranks that train together; None means the default group.
        placement: where the whole model rests: ``Sharded()`` or ``Central()``.
        optimizer_state: what becomes of it at a merge: ``CarryState()`` or ``ResetState()``.
        scale: whether a subnet makes up for the units it lacks: ``Unscaled()``, ``Averaged()`` or
            ``Scaled()``.

    Attributes:
        subnet: this rank's smaller module; its modules and parameters persist.
        optimizer: over its trainable parameters.

    Raises:
        DisagreementError: (a ValueError) what one rank found wrong, or where ranks differ; all
            ranks raise the same sentence.
    """

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
    ) -> None:
        placement, scale = placement or Sharded(), scale or Unscaled()
        self._optimizer_state = optimizer_state or CarryState()
        self._members = members = SubnetCollectives(process_group, _device_of(module))
        policies = [partition, interval, placement, self._optimizer_state, scale]
        self._facts, problem = _examine(module, policies, members.size, process_group)
        members.check_consistent_across_ranks(self._facts, problem)
        self._module = module
        self._partition = partition
        self._interval = interval
        self._widths = partition.widths(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            members.broadcast_(tensor.data, 0)
        tensors = tensors_of(module)
        self._cuts = find_cuts(self._widths, tensors)
        self.subnet = self._build_subnet(module, scale)
        times = scale.enlargement(members.size)
        enlarged = {name: times for width in self._widths for name in width.consumer_weights}
        self._whole = ModelShards(self._cuts, tensors, placement, members, enlarged)
        self._placement = placement
        self._exchange = ShardExchange(members)
        self._round, self._steps = 0, 0
        self._is_assembled = False
        self._draw_units()
        self._exchange.hand_out(self._whole.items(tensors_of(self.subnet)), self._deals)
        self.optimizer = self._make_optimizer(optimizer_fn)
        self._first_state = copy.deepcopy(self.optimizer.state_dict()["state"])
        self._outer_steps = StepHook(self.optimizer, self._after_step)
        release(module.parameters())  # last: if something fails, the module is still whole

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run this rank's subnet."""
        self._outer_steps.see_forward()
        return self.subnet(*inputs, **kwargs)

    @property
    def round_index(self) -> int:
        """How many times units have been dealt out anew."""
        return self._round

    @property
    def units(self) -> dict[str, Tensor]:
        """By width, the units that this rank has now: int64, ascending."""
        return {name: pieces[self._members.rank] for name, pieces in self._units.items()}

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent for training; ``full_model()`` and checks are not counted."""
        return self._members.bytes_sent

    @property
    def payload_bytes(self) -> int:
        """Bytes of all subnets' cut tensors: what one way of a round carries, without state.

        What stays on its rank is counted, what is shared is not: for an MLP with one hidden width
        n ranks share F x H weights, H biases and H x C weights.
        """
        size = self._members.size
        tensors = tensors_of(self.subnet)
        return sum(
            torch.Size(cut.part_shape(subnet, size)).numel() * tensors[name].element_size()
            for name, cut in self._cuts.items()
            for subnet in range(size)
        )

    def flush(self) -> None:
        """Merge what was learned since the last merge, and deal out anew; all ranks call it.

        Returns when all ranks have come to it. Does nothing where no rank has taken a step since.
        """
        is_last = False
        while not is_last:
            meeting = self._meet(_Call.FLUSH)
            is_last = all(call == _Call.FLUSH for call, _ in meeting)
            if any(steps for _, steps in meeting):
                self._begin_round()

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        """Hold the whole model in the module inside the context; all ranks enter it together.

        What was learned since the last merge is in it, and training goes on as if nothing had
        been. Changes made inside are lost: save or copy what shall stay.

        Raises:
            RuntimeError: it is entered already.
        """
        if self._is_assembled:
            raise RuntimeError("assembled() must not be entered inside itself")
        self._meet(_Call.ASSEMBLE)
        parameters = list(self._module.parameters())
        self._is_assembled = True
        try:
            allocate(parameters)
            with self._members.uncounted():
                self._assemble()
            yield self._module
        finally:
            release(parameters)
            self._is_assembled = False

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint; every rank saves its own, between two steps.

        Its tensors are the live ones. Schedulers, random generators and the place in the data stay
        the user's.
        """
        return {
            "facts": self._facts,
            "place": [self._members.rank, self._members.size],
            "round": self._round,
            "steps": self._steps,
            "whole": self._whole.state_dict(),
            "subnet": self.subnet.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on bit for bit where ``state_dict`` was taken; all ranks together.

        Raises:
            DisagreementError: (a ValueError) on every rank alike: a rank finds the state of another
                rank, number of ranks, partition or module.
        """
        round_index = ("round of state_dict", str(state_dict.get("round")))
        self._members.check_consistent_across_ranks(
            [round_index], self._problem_of_state(state_dict)
        )
        self._round, self._steps = state_dict["round"], state_dict["steps"]
        self._draw_units()
        self._whole.load_state_dict(state_dict["whole"])
        self.subnet.load_state_dict(state_dict["subnet"])
        self.optimizer.load_state_dict(state_dict["optimizer"])

    def close(self) -> None:
        """Let the optimizer train the subnet alone from now on: nothing is merged any more."""
        self._outer_steps.close()

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            "SubnetTrainer must not be copied or pickled: save its state_dict(), or copy what "
            "assembled() yields"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(None)

    def _build_subnet(self, module: nn.Module, scale: Scale) -> nn.Module:
        rank, size = self._members.rank, self._members.size
        made, problem = module, None
        try:
            made = build_subnet(module, self._widths, self._cuts, rank, size)
            scale.apply(made, self._widths, rank, size)
        except Exception as error:  # agree() raises it on every rank
            problem = f"module must be one that can be copied: {type(error).__name__}: {error}"
        self._members.check_consistent_across_ranks([], problem)
        return made

    def _make_optimizer(self, optimizer_fn: OptimizerFn) -> Optimizer:
        parameters = [p for p in self.subnet.parameters() if p.requires_grad]
        made: Any = None
        try:
            made = optimizer_fn(parameters)
            problem = find_problem_of_optimizer(made, parameters)
            if problem is None:
                self._whole.begin_states(self._travelling(made))
        except Exception as error:  # agree() raises it on every rank
            problem = f"optimizer_fn: {type(error).__name__}: {error}"
        self._facts.append(("optimizer", type(made).__qualname__))
        self._members.check_consistent_across_ranks(self._facts, problem)
        optimizer: Optimizer = made
        return optimizer

    def _after_step(self) -> None:
        self._steps += 1
        if self._steps >= self._interval:  # more: a merge has failed, and is tried again
            self._meet(_Call.STEP)
            self._begin_round()

    def _begin_round(self) -> None:
        parts, states = tensors_of(self.subnet), self._travelling(self.optimizer)
        items = [*self._whole.items(parts), *self._whole.state_items(states)]
        self._exchange.merge(items, self._deals)
        shared = self._shared(parts)
        shared += [s for name in parts if name not in self._cuts for s in states[name].values()]
        for tensor, mean in zip(shared, average(shared, self._members), strict=True):
            tensor.data.copy_(mean)
        self._round += 1
        self._steps = 0
        self._draw_units()
        self._exchange.hand_out(items, self._deals)
        self._optimizer_state.renew(self.optimizer, self._first_state)

    def _assemble(self) -> None:
        parts, targets = tensors_of(self.subnet), tensors_of(self._module)
        self._exchange.merge(self._whole.items(parts), self._deals)
        self._whole.write_into({name: tensor.data for name, tensor in targets.items()})
        means = average(self._shared(parts), self._members)
        averaged = dict(zip(self._names_of_shared(parts), means, strict=True))
        with torch.no_grad():
            for name, target in targets.items():
                if name not in self._cuts:
                    target.data.copy_(averaged.get(name, parts[name]))
            mine = dict(self.subnet.named_buffers())
            for name, buffer in self._module.named_buffers():
                if name not in targets:
                    buffer.copy_(mine[name])

    def _shared(self, parts: Mapping[str, Tensor]) -> list[Tensor]:
        return [parts[name].detach() for name in self._names_of_shared(parts)]

    def _names_of_shared(self, parts: Mapping[str, Tensor]) -> list[str]:
        """What the ranks average: frozen parameters are the same everywhere."""
        return [
            name
            for name, tensor in parts.items()
            if name not in self._cuts
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        ]

    def _travelling(self, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
        named = dict(self.subnet.named_parameters())
        found = self._optimizer_state.travelling(optimizer, named)
        return {name: found.get(name, {}) for name in tensors_of(self.subnet)}

    def _draw_units(self) -> None:
        self._units = self._partition.draw(self._widths, self._round, self._members.size)
        self._deals = assign(self._cuts, self._units, self._placement, self._members)

    def _meet(self, call: "_Call") -> list[tuple[int, int]]:
        """Make sure that all ranks are here: each one's call, and its steps since the last merge.

        Raises:
            DisagreementError: on all ranks: they have not come to do the same.
        """
        state, problem = self._number_of_state()
        everyone = self._members.gather_numbers([call, self._round, state, self._steps])
        if problem is not None:
            raise problem
        first = everyone[0]
        for rank, other in enumerate(everyone):
            merges = [each[0] != _Call.ASSEMBLE for each in (first, other)]
            if merges[0] != merges[1] or first[1] != other[1]:
                raise DisagreementError(
                    f"all ranks must make the same calls, got {_describe_call(first)} on rank 0 "
                    f"and {_describe_call(other)} on rank {rank}; call flush() on every rank when "
                    "its batches have run out, before assembled()"
                )
            if first[2] != other[2]:
                raise DisagreementError(
                    "all ranks must have optimizer state for the same parameters, got others on "
                    f"rank {rank} than on rank 0; give every rank a batch and every parameter a "
                    "gradient, or use ResetState()"
                )
        return [(other, steps) for other, _, _, steps in everyone]

    def _number_of_state(self) -> tuple[int, ValueError | None]:
        """Alike on ranks with optimizer state of the same kinds; or why it cannot travel."""
        try:
            kinds = [
                f"{name} {key} {value.dtype}"
                for name, states in self._travelling(self.optimizer).items()
                for key, value in states.items()
            ]
        except ValueError as error:  # raised when the others have heard of it
            return -1, error
        return zlib.crc32("/".join(kinds).encode()), None

    def _problem_of_state(self, state_dict: Mapping[str, Any]) -> str | None:
        place = [self._members.rank, self._members.size]
        if state_dict.get("place") != place:
            return (
                f"state_dict must be that of rank {place[0]} of {place[1]}, got one of "
                f"{state_dict.get('place')}; on other ranks begin from the assembled model"
            )
        saved = [(name, value) for name, value in state_dict["facts"]]
        difference = first_difference(self._facts, saved)
        if difference:
            return (
                f"state_dict must be of the same {difference[0]}, {difference[1]}, got "
                f"{difference[2]}"
            )
        return None


class _Call(enum.IntEnum):
    """What a rank is in when it meets the others."""

    STEP = 0
    FLUSH = 1
    ASSEMBLE = 2


def _describe_call(numbers: list[int]) -> str:
    call = {0: "optimizer.step()", 1: "flush()", 2: "assembled()"}[numbers[0]]
    return f"{call} in round {numbers[1]} after {numbers[3]} steps"


def _device_of(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _examine(
    module: nn.Module,
    policies: list[Any],
    num_ranks: int,
    process_group: dist.ProcessGroup | None,
) -> tuple[Facts, str | None]:
    """The facts that ranks must share and what is wrong here; never raises, so all hear it."""
    partition, interval, placement, *_ = policies
    names = ["partition", "interval", "placement", "optimizer_state", "scale"]
    try:
        config_fields = [(name, repr(policy)) for name, policy in zip(names, policies, strict=True)]
        config_fields += describe(module)
        problem = find_validation_error(
            module, partition, interval, placement, num_ranks, process_group
        )
        if problem is None:
            config_fields += describe_widths(partition.widths(module))
    except Exception as error:  # agree() raises it on every rank
        return [], f"{type(error).__name__}: {error}"
    return config_fields, problem
