import time

import torch

from pyparallel.compression import CommStats


def test_bytes_and_seconds_add_up():
    stats = CommStats()
    stats.count(torch.zeros(5, dtype=torch.bfloat16), 1.5)
    stats.count(torch.zeros(2, dtype=torch.uint8), 0)
    assert (stats.payload_bytes, stats.wire_bytes) == (12, 15.0)
    for _ in range(2):
        with stats.encoding():
            time.sleep(0.002)
    assert stats.encode_seconds >= 0.004
    assert stats.decode_seconds == 0
