"""Messages of fewer bytes: compressors, what they remember, and where they attach."""

from .auto_encoder import AutoEncoder, ConvAutoEncoder
from .cast import Cast
from .chain import Chain
from .compressor import AttachPoint, Compressor, Message
from .corruption import CorruptMessageError
from .ddp import GradientCompression, compressed_hook, ddp_hook
from .dgc import DGC
from .diagonal import Diagonal
from .error_feedback import ErrorFeedback
from .finite import Finite, NonFiniteError
from .fsdp import (
    CompressedAllGather,
    CompressedReduceScatter,
    FSDPCompression,
    compress_fsdp,
    fsdp_all_gather,
    fsdp_reduce_scatter,
)
from .layout import Layout, Piece
from .learned import Learned
from .memory import Memory, merge_states
from .meter import Meter
from .natural import Natural
from .per_parameter import PerParameter
from .perm_k import PermK
from .power_sgd import PowerSGD
from .qsgd import QSGD
from .quantized import Fp8, Int4, Int8
from .random_k import RandomK
from .ranks import Ranks
from .scaled_perm_k import HeterogeneousPermK, ScaledPermK
from .sign import Sign
from .state import State
from .switch import Switch
from .ternary import Ternary
from .threshold import Threshold
from .top_k import TopK

__all__ = [
    "DGC",
    "QSGD",
    "AttachPoint",
    "AutoEncoder",
    "Cast",
    "Chain",
    "CompressedAllGather",
    "CompressedReduceScatter",
    "Compressor",
    "ConvAutoEncoder",
    "CorruptMessageError",
    "Diagonal",
    "ErrorFeedback",
    "FSDPCompression",
    "Finite",
    "Fp8",
    "GradientCompression",
    "HeterogeneousPermK",
    "Int4",
    "Int8",
    "Layout",
    "Learned",
    "Memory",
    "Message",
    "Meter",
    "Natural",
    "NonFiniteError",
    "PerParameter",
    "PermK",
    "Piece",
    "PowerSGD",
    "RandomK",
    "Ranks",
    "ScaledPermK",
    "Sign",
    "State",
    "Switch",
    "Ternary",
    "Threshold",
    "TopK",
    "compress_fsdp",
    "compressed_hook",
    "ddp_hook",
    "fsdp_all_gather",
    "fsdp_reduce_scatter",
    "merge_states",
]
