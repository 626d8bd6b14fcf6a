"""Headers of messages that are forged with a checksum that fits."""

import zlib

from pyparallel.pipeline.messages.format import _CHECKSUM, HEADER_WORDS


def write_checksum(header):
    """Write the checksum of a header's other words into it, int64 in the host's memory."""
    header[_CHECKSUM] = 0
    header[_CHECKSUM] = zlib.crc32(header[:HEADER_WORDS].numpy())
