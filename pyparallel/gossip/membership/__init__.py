"""Members that come and go while the others train, and the mass that moves with them."""

from .base import Change, Membership
from .lighthouse import Lighthouse

__all__ = ["Change", "Lighthouse", "Membership"]
