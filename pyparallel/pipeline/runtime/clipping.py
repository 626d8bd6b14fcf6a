"""The gradients of the whole model before an update: unscaled, and clipped by their norm."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import Collectives, Run, device_of


def clip_grad_norm_(gradients: Sequence[Tensor], max_norm: float, run: Run) -> None:
    """Scale gradients, on all ranks together, as ``torch.nn.utils.clip_grad_norm_`` does on one."""
    total = squared_norm(gradients, device_for(gradients, run))
    Collectives(run).all_reduce_(total)
    _scale_(gradients, max_norm, total)


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements: 0-d, float64, on ``device``."""
    return squared_norms(gradients, device).sum()


def squared_norms(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the sum of the squares of each gradient's elements: (n,), float64, on ``device``."""
    known = [gradient for gradient in gradients if gradient is not None]
    if not known:
        return torch.zeros(len(gradients), dtype=torch.float64, device=device)
    norms = iter(torch._foreach_norm(known, dtype=torch.float64))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    each_norm = [zero if each is None else next(norms).to(device) for each in gradients]
    return torch.stack(each_norm).square()


def device_for(gradients: Sequence[Tensor], run: Run) -> torch.device:
    """Return the device of what ranks reduce: that of gradients, or one that the group sends."""
    if gradients:
        return gradients[0].device
    is_alone = run.group is None and not dist.is_initialized()
    return torch.device("cpu") if is_alone else device_of(run.group)


def _scale_(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale gradients in place by ``max_norm`` over the root of ``total``, if that is below 1."""
    ratio = max_norm / (total.sqrt() + 1e-6)
    scale = torch.where(ratio < 1.0, ratio, 1.0)
    if scale.is_cpu:
        factor = scale.item()
        for gradient in gradients:
            gradient.mul_(factor)
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, alike in by_dtype.items():  # without a wait of the host, and in few kernels
        torch._foreach_mul_(alike, scale.to(dtype))


class LossScale:
    """The scale of the losses, an enabled ``GradScaler``'s, which all ranks change alike.

    That of Micikevicius et al., ICLR 2018, arXiv 1710.03740, by torch's rule: it grows after
    ``growth_interval`` updates without an infinity, and backs off after one with it.
    """

    def __init__(self, grad_scaler: torch.amp.GradScaler, run: Run) -> None:
        self._grad_scaler = grad_scaler
        self._run = run
        self.factor = 1.0  # in this step

    def read(self) -> None:
        """Read ``factor`` for the next step; on a GPU the host may wait for it."""
        self.factor = float(self._grad_scaler.get_scale())

    @torch.no_grad()
    def unscale_(self, gradients: Sequence[Tensor]) -> bool:
        """Divide gradients in place, on all ranks together; return whether all are finite."""
        device = device_for(gradients, self._run)
        found_inf, inverse = torch.zeros((), device=device), 1 / self.factor
        for gradient in gradients:
            gradient.mul_(inverse)
            found_inf += ~gradient.isfinite().all()
        Collectives(self._run).all_reduce_(found_inf)
        is_finite = not found_inf.item()
        self._update(is_finite)
        return is_finite

    def _update(self, is_finite: bool) -> None:
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
    once the pipeline is full. An update that was skipped leaves the last norm as it is. Norms stay
    on the device.
    """

    def __init__(self, max_norm: float) -> None:
        # The squared norm of each parameter's gradient in the last update that was not skipped.
        self.last: Tensor | None = None  # (n,) float64; None before
        self._max_norm = max_norm
        self._earlier: Tensor | None = None
        self._own: Tensor | None = None  # of the next update
        self._later: Tensor | None = None  # likewise

    def resume(self, last: Tensor | None) -> None:
        """Go on after an update with these norms, as of ``last``."""
        self.last = last

    def norm_up_to_here(self, device: torch.device) -> Tensor:
        """Return the last squared norm of this and the earlier stages: 0-d, float64."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for each in (self.last, self._earlier):
            if each is not None:
                total += each.sum().to(device)
        return total

    def norm_from_here(self, accumulated: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """Return the squared norm of this and the later stages in the next update: 0-d, float64."""
        self._own = squared_norms(accumulated, device)
        return self._own.sum() if self._later is None else self._own.sum() + self._later

    def note_earlier(self, squared_norm: Tensor) -> None:
        """Keep what ``norm_up_to_here`` of the previous stage has returned."""
        self._earlier = squared_norm

    def note_later(self, squared_norm: Tensor) -> None:
        """Keep what ``norm_from_here`` of the next stage has returned."""
        self._later = squared_norm

    def clip_(self, gradients: Sequence[Tensor], found_inf: Tensor | None) -> None:
        """Scale the gradients of an update in place; ``found_inf``: it will be skipped."""
        assert self._own is not None, "the backward of the update's last microbatch comes before"
        known = [each for each in (self._own.sum(), self._later, self._earlier) if each is not None]
        _scale_(gradients, self._max_norm, torch.stack(known).sum())
        if found_inf is not None:
            last = torch.zeros_like(self._own) if self.last is None else self.last
            self._own = torch.where(found_inf, last.to(found_inf.device), self._own)
        self.last = self._own
