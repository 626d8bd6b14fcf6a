import time

import torch

from pyparallel.compression import CommStats


def test_bytes_and_seconds_add_up():
    meter = CommStats()
    meter.count(torch.zeros(5, dtype=torch.bfloat16), 1.5)
    meter.count(torch.zeros(2, dtype=torch.uint8), 0)
    assert (meter.payload_bytes, meter.wire_bytes) == (12, 15.0)
    for _ in range(2):
        with meter.encoding():
            time.sleep(0.002)
    assert meter.encode_seconds >= 0.004
    assert meter.decode_seconds == 0
