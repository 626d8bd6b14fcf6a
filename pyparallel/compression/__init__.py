"""Messages of fewer bytes: compressors, what they remember, and where they attach."""

from .cast import Cast
from .compressor import AttachPoint, Compressor, Message
from .corruption import CorruptMessageError
from .ddp import GradientCompression, compressed_hook, ddp_hook
from .error_feedback import ErrorFeedback
from .layout import Layout, Piece
from .memory import Memory, merge_states
from .meter import Meter
from .natural import Natural
from .power_sgd import PowerSGD
from .qsgd import QSGD
from .quantized import Fp8, Int4, Int8
from .ranks import Ranks
from .sign import Sign
from .state import State
from .ternary import Ternary
from .top_k import TopK

__all__ = [
    "QSGD",
    "AttachPoint",
    "Cast",
    "Compressor",
    "CorruptMessageError",
    "ErrorFeedback",
    "Fp8",
    "GradientCompression",
    "Int4",
    "Int8",
    "Layout",
    "Memory",
    "Message",
    "Meter",
    "Natural",
    "Piece",
    "PowerSGD",
    "Ranks",
    "Sign",
    "State",
    "Ternary",
    "TopK",
    "compressed_hook",
    "ddp_hook",
    "merge_states",
]
