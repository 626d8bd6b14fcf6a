"""The gradients of the whole model before an update: unscaled, and clipped by their norm."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Collectives, Value, device_of, tensors_of


def clip_grad_norm_(
    gradients: Sequence[Tensor], max_norm: float, process_group: dist.ProcessGroup | None
) -> None:
    """Scale gradients across ranks as ``torch.nn.utils.clip_grad_norm_`` does on one.

    Every rank of the group must call this.

    Args:
        gradients: this rank's; scaled in place.
        max_norm: the largest 2-norm over all ranks.
        process_group: None means the default group, or this rank alone where there is none.
    """
    is_alone = process_group is None and not dist.is_initialized()
    own = gradients[0].device if gradients else None
    device = own or (torch.device("cpu") if is_alone else device_of(process_group))
    total = squared_norm(gradients, device)
    Collectives(process_group).all_reduce_(total)
    _scale_(gradients, max_norm, total)


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements: 0-d, float64, on ``device``."""
    return squared_norms(gradients, device).sum()


def squared_norms(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the sum of the squares of each gradient's elements: (n,), float64, on ``device``."""
    squares = torch.zeros(len(gradients), dtype=torch.float64, device=device)
    for square, gradient in zip(squares.unbind(), gradients, strict=True):
        if gradient is not None:
            square.copy_(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
    return squares


def _scale_(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale gradients in place by ``max_norm`` over the root of ``total``, if that is below 1."""
    ratio = max_norm / (total.sqrt() + 1e-6)
    scale = torch.where(ratio < 1.0, ratio, 1.0)
    factor = scale.item() if scale.is_cpu else scale  # on a GPU the host would wait
    for gradient in gradients:
        gradient.mul_(factor)


class LossScale:
    """The scale of the losses, a ``GradScaler``'s, which all ranks change alike.

    It is that of Micikevicius et al., ICLR 2018, arXiv 1710.03740, by torch's rule: after an update
    without an infinity for ``growth_interval`` times it grows, after one with it backs off.

    Args:
        grad_scaler: enabled, in the same state on all ranks.
        process_group: None means the default group, or this rank alone where there is none.
    """

    def __init__(
        self, grad_scaler: torch.amp.GradScaler, process_group: dist.ProcessGroup | None
    ) -> None:
        self._grad_scaler = grad_scaler
        self._group = process_group

    def read(self) -> float:
        """Return the scale; on a GPU the host may wait for it."""
        return float(self._grad_scaler.get_scale())

    @torch.no_grad()
    def unscale_(self, gradients: Sequence[Tensor]) -> bool:
        """Divide gradients in place; return whether those of all ranks are finite.

        Every rank of the group must call this.
        """
        is_alone = self._group is None and not dist.is_initialized()
        own = gradients[0].device if gradients else None
        device = own or (torch.device("cpu") if is_alone else device_of(self._group))
        found_inf, inverse = torch.zeros((), device=device), 1 / self.read()
        for gradient in gradients:
            gradient.mul_(inverse)
            found_inf += ~gradient.isfinite().all()
        Collectives(self._group).all_reduce_(found_inf)
        is_finite = not found_inf.item()
        self._update(is_finite)
        return is_finite

    def _update(self, is_finite: bool) -> None:
        """Change the scale as ``GradScaler.update`` does on one rank."""
        state = self._grad_scaler.state_dict()
        scale, steps = state["scale"], state["_growth_tracker"] + 1
        if not is_finite:
            scale, steps = scale * state["backoff_factor"], 0
        elif steps == state["growth_interval"]:
            scale, steps = scale * state["growth_factor"], 0
        self._grad_scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": steps})


class LastNormClipper:
    """Clips a stage's gradients by the norm of the whole model, with a schedule without flushes.

    When stage s updates for the u-th time, the later stages have done their update u, and the
    earlier ones have not: they have the gradients of u only from s. So the norm is of the gradients

    * of update u on stage s and the later stages: their squared norms arrive with the gradients;
    * of the last update that each earlier stage had done when it sent the newest activations, with
      which its squared norm arrives; 0 before its first update.

    With m microbatches for each update, that of stage j < s is update u - ceil((1 + s - j) / m)
    once the pipeline is full. An update that was skipped leaves the last norm as it is.

    Norms stay on the device; they are sent as integers, which compressors leave as they are.

    Args:
        max_norm: the largest 2-norm.
        microbatches_per_update: the last one's gradients carry the norm.

    Attributes:
        last: the squared norm of each parameter's gradient in the last update of the stage that was
            not skipped: (n,), float64; None before.
    """

    def __init__(self, max_norm: float, microbatches_per_update: int) -> None:
        self.last: Tensor | None = None
        self._max_norm = max_norm
        self._every = microbatches_per_update
        self._earlier: Tensor | None = None
        self._own: Tensor | None = None  # of the next update
        self._later: Tensor | None = None  # likewise

    def pack_activations(self, value: Value) -> Value:
        """Append the last squared norm of this and the earlier stages to a forward's output."""
        device = _device_of(value)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for each in (self.last, self._earlier):
            if each is not None:
                total += each.sum().to(device)
        bits = total.view(torch.int64)
        return (value, bits) if isinstance(value, Tensor) else (*value, bits.view(1))

    def unpack_activations(self, value: Value) -> Value:
        """Take what the previous stage has appended; return the activations."""
        *activations, bits = tensors_of(value)
        self._earlier = bits.view(torch.float64).view(())
        return tuple(activations) if bits.dim() else activations[0]

    def unpack_gradients(self, microbatch: int, value: Value) -> tuple[Tensor, ...]:
        """Take what the next stage has appended, if any; return the output gradients."""
        gradients = tensors_of(value)
        if not self._ends_update(microbatch):
            return gradients
        *rest, bits = gradients
        self._later = bits.view(torch.float64)
        return tuple(rest)

    def pack_gradients(
        self,
        value: tuple[Tensor, ...],
        accumulated: Sequence[Tensor | None],
        microbatch: int,
        outputs: Value,
    ) -> tuple[Tensor, ...]:
        """Append the squared norm of this and the later stages to the input gradients.

        Args:
            value: the input gradients, of a backward.
            accumulated: gradient of each parameter; None: it has none.
            microbatch: whose backward it was.
            outputs: of its forward, on the device of the norm.
        """
        if not self._ends_update(microbatch):
            return value
        self._own = squared_norms(accumulated, _device_of(outputs))
        total = self._own.sum() if self._later is None else self._own.sum() + self._later
        return *value, total.view(torch.int64)

    def clip_(self, gradients: Sequence[Tensor], found_inf: Tensor | None) -> None:
        """Scale the gradients of an update that is not skipped.

        Args:
            gradients: of the parameters, as of the last ``pack_gradients``; scaled in place.
            found_inf: 0-d bool: the optimizer will skip the update; None: it will not.
        """
        assert self._own is not None, "the backward of the update's last microbatch comes before"
        known = [each for each in (self._own.sum(), self._later, self._earlier) if each is not None]
        _scale_(gradients, self._max_norm, torch.stack(known).sum())
        if found_inf is not None:
            last = torch.zeros_like(self._own) if self.last is None else self.last
            self._own = torch.where(found_inf, last.to(found_inf.device), self._own)
        self.last = self._own

    def _ends_update(self, microbatch: int) -> bool:
        return (microbatch + 1) % self._every == 0


def _device_of(value: Value) -> torch.device:
    return next((each.device for each in tensors_of(value)), torch.device("cpu"))
