"""Messages of fewer bytes: compressors, what they remember, and where they attach."""

from .auto_encoder import AutoEncoder, ConvAutoEncoder
from .cast import Cast
from .compressor import AttachPoint, Compressor, Message
from .corruption import CorruptMessageError
from .ddp import GradientCompression, compressed_hook, ddp_hook
from .dgc import DGC
from .error_feedback import ErrorFeedback
from .layout import Layout, Piece
from .learned import Learned
from .memory import Memory, merge_states
from .meter import Meter
from .quantized import Int8
from .ranks import Ranks
from .state import State
from .top_k import TopK

__all__ = [
    "DGC",
    "AttachPoint",
    "AutoEncoder",
    "Cast",
    "Compressor",
    "ConvAutoEncoder",
    "CorruptMessageError",
    "ErrorFeedback",
    "GradientCompression",
    "Int8",
    "Layout",
    "Learned",
    "Memory",
    "Message",
    "Meter",
    "Piece",
    "Ranks",
    "State",
    "TopK",
    "compressed_hook",
    "ddp_hook",
    "merge_states",
]
