import pytest
import torch

from pyparallel.compression import CorruptMessageError
from pyparallel.compression.corrupt_messages import refusing_corrupt, with_sender


def test_an_op_s_error_about_a_message_is_quoted():
    raises = pytest.raises(
        CorruptMessageError, match=r"from rank 3 \(scales are odd\): discard this"
    )
    with raises, with_sender(3), refusing_corrupt():
        raise RuntimeError("scales are odd\nat some place in a file")


def test_other_errors_are_left_alone():
    with pytest.raises(torch.OutOfMemoryError), refusing_corrupt():
        raise torch.OutOfMemoryError("none left")
    with pytest.raises(TypeError, match="odd"), with_sender(3), refusing_corrupt():
        raise TypeError("odd")
