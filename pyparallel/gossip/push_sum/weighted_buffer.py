"""The de-biased values of a flat buffer, and their PushSum mass."""

import torch
from torch import Tensor


class WeightedBuffer:
    """z and w. The numerator x = w * z of the papers exists only while an optimizer steps on it.

    Args:
        values: z: flat, float32, bfloat16 or float16; written in place.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.weight = torch.ones((), dtype=torch.float64, device=values.device)
        self._holds_numerator = False

    @torch.no_grad()
    def to_numerator(self) -> None:
        """Turn z into x = w * z, in place."""
        self._holds_numerator = True
        self.values.mul_(self.weight)

    @torch.no_grad()
    def to_debiased(self) -> None:
        """Turn x back into z = x / w, in place; nothing to do where the values are z."""
        if self._holds_numerator:
            self._holds_numerator = False
            self.values.div_(self.weight)

    def outgoing_mass(self, shares: tuple[float, ...]) -> Tensor:
        """The mass that each share is, (k,) float64; w stays as it is."""
        masses = self.weight.new_empty(len(shares))
        for slot, share in enumerate(shares):  # numbers of Python's: nothing waits for a copy
            torch.mul(self.weight, share, out=masses[slot])
        return masses
