"""PushSum over the flat buffers of a model, with dense or compressed messages."""

from .compressed_buffer import CompressedBuffer
from .dense_buffer import DenseBuffer
from .push_sum import PushSum

__all__ = ["CompressedBuffer", "DenseBuffer", "PushSum"]
