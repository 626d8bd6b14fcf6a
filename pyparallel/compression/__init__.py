"""Messages of fewer bytes: compressors, what they remember, and where they attach."""

from .cast import Cast
from .chain import Chain
from .compressor import AttachPoint, Compressor, Message
from .corruption import CorruptMessageError
from .ddp import GradientCompression, compressed_hook, ddp_hook
from .dgc import DGC
from .error_feedback import ErrorFeedback
from .finite import Finite, NonFiniteError
from .layout import Layout, Piece
from .memory import Memory, merge_states
from .meter import Meter
from .per_parameter import PerParameter
from .perm_k import PermK
from .quantized import Int8
from .random_k import RandomK
from .ranks import Ranks
from .state import State
from .switch import Switch
from .threshold import Threshold
from .top_k import TopK

__all__ = [
    "DGC",
    "AttachPoint",
    "Cast",
    "Chain",
    "Compressor",
    "CorruptMessageError",
    "ErrorFeedback",
    "Finite",
    "GradientCompression",
    "Int8",
    "Layout",
    "Memory",
    "Message",
    "Meter",
    "NonFiniteError",
    "PerParameter",
    "PermK",
    "Piece",
    "RandomK",
    "Ranks",
    "State",
    "Switch",
    "Threshold",
    "TopK",
    "compressed_hook",
    "ddp_hook",
    "merge_states",
]
