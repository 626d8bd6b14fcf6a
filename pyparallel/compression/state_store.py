"""The states of a compressor for all buffers of a model, kept when buffers are rebuilt."""

import copy
from typing import Any

import torch
from torch import Tensor

from ..ops._corrupt import raise_if_counted
from ..training import check_format, check_like, seal, summarize
from ..training.arguments import require
from .compressor import Compressor
from .layout import BufferLayout
from .state import CompressorState

_KEYS = {"compressor", "num_ranks", "parameters", "common"}
_RULE = f"state must be a result of state_dict(), with {', '.join(sorted(_KEYS))}"


class StateStore:
    """The states of a compressor by buffer, which follow parameters into other buffers.

    DDP rebuilds its buckets after the first step, and another run may have other buckets: the state
    of a parameter follows it. With ``model``, all parameters, a state of another model is rejected
    at once; else they are known when their first buffer arrives.
    """

    def __init__(
        self, compressor: Compressor, rank: int, num_ranks: int, model: BufferLayout | None = None
    ) -> None:
        self.compressor = compressor
        self._rank = rank
        self._num_ranks = num_ranks
        self._model = model
        self._states: dict[BufferLayout, CompressorState] = {}
        self._devices: set[torch.device] = set()
        self._unassigned: dict[str, dict[str, Tensor]] = {}  # by name, not in a buffer yet
        self._unassigned_common: dict[str, dict[str, Any]] = {}

    def of(self, layout: BufferLayout, device: torch.device) -> CompressorState:
        """Return the state of a buffer with this layout."""
        state = self._states.get(layout)
        if state is None:
            self._release_states(layout)
            state = self.compressor.init(layout, device, self._rank)
            # A new parameter, such as an unfrozen one, has no step, and one that had no gradient
            # for a while has fewer: draws must not repeat, nor warm-ups begin again.
            known = [self._unassigned_common.get(name, {}) for name in layout.names]
            state.load_state(
                {name: self._unassigned.get(name, {}) for name in layout.names},
                max(known, key=_last_step, default={}),
            )
            for name in layout.names:
                for tensor in self._unassigned.pop(name, {}).values():
                    if tensor.is_cuda:  # perhaps of another stream, which may not reuse it yet
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
                self._unassigned_common.pop(name, None)
            self._states[layout] = state
            self._devices.add(device)
        return state

    def copy(
        self, rank: int, num_ranks: int, common: dict[str, dict[str, Any]] | None = None
    ) -> "StateStore":
        """Return a copy, for a rank of another number of ranks.

        ``common`` is what ``common_state`` of another rank has returned, in place of this one's.
        """
        copied = StateStore(self.compressor, rank, num_ranks, self._model)
        copied._hold(self._parameter_state(), self.common_state() if common is None else common)
        return copied

    def norm(self, key: str) -> float:
        """Return the Euclidean norm over all parameters of the state under a key."""
        parts = [
            tensor.norm()
            for tensors in self._parameter_state().values()
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] == key
        ]
        # Those of loaded states are in the CPU's memory until their buffers come.
        parts = [part.to(parts[-1].device) for part in parts]
        return float(torch.stack(parts).norm()) if parts else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank by parameter name; it differs between ranks.

        It is a copy in the memory of the CPU. To resume with another number of ranks, see
        `merge_states`.
        """
        return seal(self.content())

    def content(self) -> dict[str, Any]:
        """Return what ``state_dict`` copies, as a part of another state."""
        for device in self._devices:
            raise_if_counted(device, wait=True)
        return {
            "compressor": repr(self.compressor),
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "parameters": self._parameter_state(),
            "common": self.common_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a ``state_dict``, to resume bit for bit; raises as ``check_state``."""
        self.check_state(state)
        self.load_content(state)

    def load_content(self, state: dict[str, Any]) -> None:
        """Load a ``content``, after ``check_content``."""
        self._hold(state["parameters"], state["common"])

    def _hold(
        self, parameters: dict[str, dict[str, Tensor]], common: dict[str, dict[str, Any]]
    ) -> None:
        """Copy states by parameter name, for the buffers that come."""
        self._states = {}
        self._unassigned = {
            name: {key: tensor.clone() for key, tensor in tensors.items()}
            for name, tensors in parameters.items()
        }
        self._unassigned_common = copy.deepcopy(common)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError for a state that ``load_state_dict`` cannot load; change nothing.

        Such a state was saved with another compressor, model, number of ranks or on another rank,
        or in another format; or it is damaged or malformed.
        """
        require(isinstance(state, dict), _RULE, summarize(state))
        check_format(state)
        self.check_content(state)

    def check_content(self, state: dict[str, Any]) -> None:
        """Check as ``check_state`` what is a part of another state."""
        require(state.keys() >= _KEYS, _RULE, summarize(state))
        mine = {"compressor": repr(self.compressor), "num_ranks": self._num_ranks}
        if "rank" in state:  # not in a merged one
            mine["rank"] = self._rank
        for key, value in mine.items():
            if state[key] != value:
                fix = "; convert it by merge_states(states_of_all_ranks, num_ranks)"
                raise ValueError(
                    f"state must have been saved with {key} {value}, got {state[key]}"
                    f"{fix if key == 'num_ranks' else ''}"
                )
        for name, tensors in state["parameters"].items():
            for key, tensor in tensors.items():
                require(isinstance(tensor, Tensor), f"{key} of {name} must be a tensor", tensor)
        for name, common in state["common"].items():
            check_like(common["step"], 0, f"common.{name}.step")
        if self._model is not None:
            _check_names(set(state["parameters"]), set(self._model.names))

    def _release_states(self, layout: BufferLayout) -> None:
        """Drop the states of buffers that held any of these parameters; keep their tensors."""
        names = set(layout.names)
        for old in [each for each in self._states if names & set(each.names)]:
            state = self._states.pop(old)
            self._unassigned.update(state.parameter_state())
            for name in set(old.names) - names:  # a view would keep the whole buffer in memory
                tensors = self._unassigned[name]
                self._unassigned[name] = {key: each.clone() for key, each in tensors.items()}
            self._unassigned_common.update({name: state.common_state() for name in old.names})

    def _parameter_state(self) -> dict[str, dict[str, Tensor]]:
        found = dict(self._unassigned)
        for state in self._states.values():
            found.update(state.parameter_state())
        return found

    def common_state(self) -> dict[str, dict[str, Any]]:
        """Return by parameter name what is equal on all ranks, such as the number of messages."""
        found = dict(self._unassigned_common)
        for state in self._states.values():
            found.update({name: state.common_state() for name in state.layout.names})
        return found


def merge_states(states: list[dict[str, Any]], num_ranks: int) -> dict[str, Any]:
    """Merge the states of all ranks into the one that every rank of a run of another size loads.

    Each new rank gets the mean of the old ranks' tensors, so the mean residual over ranks stays the
    same. States that are not the ``state_dict`` of every rank of one run, or one that is damaged,
    are a ValueError.
    """
    require(states, "states must be the states of all ranks of the old run", "none")
    first = states[0]
    rule = f"states must be the states of all {first['num_ranks']} ranks"
    require(len(states) == first["num_ranks"], rule, len(states))
    for rank, each in enumerate(states):
        check_format(each)
        rule = "states must be of one compressor and model"
        got = f"different ones in states[0] and states[{rank}]"
        require((each["compressor"], _keys(each)) == (first["compressor"], _keys(first)), rule, got)
    parameters = {
        name: {
            key: torch.stack([state["parameters"][name][key].float() for state in states]).mean(0)
            for key in tensors
        }
        for name, tensors in first["parameters"].items()
    }
    merged = {key: first[key] for key in _KEYS}
    return seal({**merged, "num_ranks": num_ranks, "parameters": parameters})


def steps_of(state: dict[str, Any]) -> str:
    """Return the numbers of messages made in a state, which all ranks must have in common."""
    commons = state["common"].values()
    found = {
        number
        for common in commons
        for key, number in common.items()
        if key.rpartition(".")[2] == "step"  # also of wrapped compressors
    }
    return ", ".join(map(str, sorted(found))) or "none"


def _last_step(common: dict[str, Any]) -> int:
    """Return the largest number of messages in a ``common_state``."""
    return max((n for key, n in common.items() if key.rpartition(".")[2] == "step"), default=-1)


def _keys(state: dict[str, Any]) -> dict[str, set[str]]:
    return {name: set(tensors) for name, tensors in state["parameters"].items()}


def _check_names(saved: set[str], mine: set[str]) -> None:
    if unknown := sorted(saved - mine):
        raise ValueError(
            "state must be of this model, got parameters that it does not have: "
            f"{', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}"
        )
